"""An agent of smolagents with a tool."""

import json

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    assert city == "Paris"
    return "fair"


agent = ToolCallingAgent(tools=[get_weather], model=OpenAIModel("policy"), verbosity_level=0)
assert agent.run("What is the weather in Paris?") == "It is fair."
print(json.dumps({"tokens": agent.monitor.get_total_token_counts().output_tokens}))
