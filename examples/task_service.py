"""A task as a program of its own, which imports nothing of OpenPPO: sums, with a second chance.

    python examples/task_service.py --port 9000

and in the file of --tasks: ``{name: sums, agent: "http://127.0.0.1:9000", data: sums.jsonl}``, whose rows have "input"
and "label". Each ``POST /run`` is an episode: it is accepted at once, played with the model at ``base_url``, and ended
with ``POST {base_url}/complete``.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen


def post(url: str, key: str, body: dict) -> dict:
    """The answer to ``body`` as JSON."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=600) as answer:
        return json.load(answer)


def play(job: dict) -> None:
    """Ask, and if the answer is wrong ask once more; the reward is 1 or 0.5 for the right answer, else 0."""
    url, key, row = job["base_url"], job["api_key"], job["row"]
    messages, reward = [{"role": "user", "content": row["input"]}], 0.0
    for worth in (1.0, 0.5):
        answer = post(f"{url}/chat/completions", key, {"model": "openppo", "messages": messages})
        message = answer["choices"][0]["message"]
        if str(row["label"]) in (message["content"] or ""):
            reward = worth
            break
        messages += [message, {"role": "user", "content": "That is wrong. Try again."}]
    post(f"{url}/complete", key, {"reward": reward, "attempt": job["attempt"]})


class Service(BaseHTTPRequestHandler):
    """Accepts episodes; each is played on a thread of its own."""

    def do_POST(self) -> None:
        """Take an episode."""
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        threading.Thread(target=play, args=(job,), daemon=True).start()
        self.send_response(202)
        self.end_headers()

    def do_GET(self) -> None:
        """Say that it is there."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A task that plays episodes for OpenPPO.")
    parser.add_argument("--port", type=int, default=9000)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Service).serve_forever()
