"""A reward server that goes away, cuts an answer and is slow while two ranks train: nothing is lost or invented."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECONDS_AWAY = 5.0
SECONDS_SLOW = 2.0
OPTIONS = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 8
    --micro_train_batch_size 2 --micro_rollout_batch_size 4 --generate_max_len 8 --zero_stage 2
    --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"""


class Rewards(BaseHTTPRequestHandler):
    """How often the text says "a"; ``troubles`` are met one after the other, each by one request."""

    troubles: list[str]
    away_until = 0.0

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"rewards": [text.count("a") for text in request["query"]]}).encode()
        trouble = self.troubles.pop(0) if time.monotonic() > self.away_until and self.troubles else ""
        if trouble == "away":
            type(self).away_until = time.monotonic() + SECONDS_AWAY
        if time.monotonic() < self.away_until:
            return self.connection.close()  # without a word
        if trouble == "slow":
            time.sleep(SECONDS_SLOW)
        self.send_response(200)
        if trouble != "cut":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: -5 if trouble == "cut" else len(body)])

    def log_message(self, *words: object) -> None:
        """Not to stderr."""


def train(folder: Path, tiny: Path, launch: Callable[..., str], troubles: list[str]) -> str:
    """The output of a run whose server has ``troubles``."""
    handler = type("Handler", (Rewards,), {"troubles": troubles})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/get_reward"
        words = f"{OPTIONS.replace('{tiny}', str(tiny))} --remote_rm_url {url} --save_path {folder}".split()
        output = launch(2, "-m", "openppo.cli.train_ppo", *words)
        server.shutdown()
    return output


def test_a_run_whose_server_has_troubles_ends_as_one_whose_server_has_none(
    tiny: Path, tmp_path: Path, launch: Callable[..., str], left_by: Callable[[Path], Any]
) -> None:
    troubles = ["", "away", "cut", "slow"]
    train(tmp_path / "calm", tiny, launch, [])
    output = train(tmp_path / "troubled", tiny, launch, troubles)
    calm = left_by(tmp_path / "calm")
    assert len(calm.metrics) == 3
    assert left_by(tmp_path / "troubled") == calm
    assert troubles == [], "all of them came"
    assert "attempt 1 of" in output
    assert "breaks off" in output
