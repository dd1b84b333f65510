"""An agent of openai-agents with a tool; arguments: the interface, and whether it streams."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api

interface, way = sys.argv[1:]
set_default_openai_api(interface)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return "fair"


async def main():
    agent = Agent(name="Guide", instructions="Look.", tools=[get_weather], model="policy")
    if way == "whole":
        return await Runner.run(agent, "What is the weather in Paris?")
    streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
    async for _ in streamed.stream_events():
        pass
    return streamed


result = asyncio.run(main())
assert result.final_output == "It is fair."
usage = result.context_wrapper.usage.output_tokens
print(json.dumps({"tokens": usage if way == "whole" or interface == "responses" else None}))
