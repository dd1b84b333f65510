"""Ask a model a sum and, when its answer is wrong, once more. A plain client: it knows nothing of training.

The address and the key are where OpenAI's own clients look for them. By hand, against any such server:

    export OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none
    echo "What is 17 + 25?" | python second_chance.py --answer 42
"""

import argparse
import json
import os
import sys
import urllib.request


def chat(messages: list[dict[str, str]]) -> dict[str, str]:
    """The model's answer as a message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        message: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return message


parser = argparse.ArgumentParser()
parser.add_argument("--answer", required=True)
answer = parser.parse_args().answer

messages = [{"role": "user", "content": sys.stdin.read()}]
reward = 0.0
for worth in (1.0, 0.5):
    messages.append(chat(messages))
    if answer in messages[-1]["content"].split():
        reward = worth
        break
    messages.append({"role": "user", "content": "That is wrong. Think again."})
print(json.dumps({"reward": reward}))
