"""A loop over tools with langchain-openai; the argument says whether it streams."""

import json
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return "fair"


model = ChatOpenAI(model="policy", stream_usage=True).bind_tools([get_weather])
messages: list = [HumanMessage("What is the weather in Paris?")]
tokens = 0
for _ in range(8):
    if sys.argv[1] == "stream":
        first, *others = model.stream(messages)
        answer = sum(others, start=first)
    else:
        answer = model.invoke(messages)
    tokens += answer.usage_metadata["output_tokens"]
    messages.append(answer)
    if not answer.tool_calls:
        break
    messages += [get_weather.invoke(call) for call in answer.tool_calls]
print(json.dumps({"tokens": tokens}))
