"""A loop over tools with the openai package; the first argument says through which of its interfaces."""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": PARAMETERS,
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
client, interface, tokens = OpenAI(), sys.argv[1], 0
messages: list = [QUESTION]


def chat():
    asked = {
        "model": "policy",
        "messages": messages,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if interface == "chat":
        return client.chat.completions.create(**asked, temperature=0.2, seed=1)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def respond():
    asked = {
        "model": "policy",
        "input": messages,
        "tools": [{"type": "function", **FUNCTION}],
        "instructions": "Look.",
    }
    if interface == "responses":
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


for _ in range(8):
    if interface.startswith("chat"):
        answer = chat()
        tokens += answer.usage.completion_tokens
        message = answer.choices[0].message
        messages.append(message)
        calls = [(call.id, call.function) for call in message.tool_calls or []]
        results = [
            {"role": "tool", "tool_call_id": number, "content": "fair"} for number, _ in calls
        ]
    else:
        answer = respond()
        tokens += answer.usage.output_tokens
        messages += answer.output
        calls = [(item.call_id, item) for item in answer.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": number, "output": "fair"}
            for number, _ in calls
        ]
    assert all(json.loads(function.arguments) == {"city": "Paris"} for _, function in calls)
    if not calls:
        break
    messages += results
print(json.dumps({"tokens": tokens}))
