"""An agent of openai-agents (``pip install openai-agents``) as its authors show it: a tool, instructions, one run.

Whoever trains the model that it talks to decides what an answer is worth: it prints none.
"""

import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


agent = Agent(
    name="Calculator",
    instructions="Use the tool for every sum. End with the number alone.",
    tools=[add],
)
result = Runner.run_sync(agent, sys.stdin.read())
print(result.final_output)
