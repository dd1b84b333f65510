"""Answer a question with OpenAI's SDK (``pip install openai``) and a tool. It knows nothing of training.

The SDK finds the address and the key of the model where it always does. By hand, against any such server:

    export OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none
    echo "What is 12 + 30?" | python openai_sum.py
"""

import json
import sys

from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


def add(arguments: str) -> str:
    """The sum of two numbers; the model reads what is wrong with its arguments."""
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"


client = OpenAI()
messages = [{"role": "user", "content": sys.stdin.read().strip()}]
while True:
    completion = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
    )
    message = completion.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = add(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
