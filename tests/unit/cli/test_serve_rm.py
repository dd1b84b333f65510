"""serve_rm as a real process, compared with the model itself."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from openppo.config import RewardConfig
from openppo.models import get_llm_for_sequence_regression
from openppo.rewards import RemoteScorer
from openppo.types import FinishReason, Prompt, Trajectory

REPO = Path(__file__).resolve().parents[3]
RunCommand = Callable[..., Any]
TOKEN = "open sesame"


def score_alone(model: Path, text: str) -> float:
    """The reward model on one text, which ends with EOS, without padding or batch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert ids[0, -1] == tokenizer.eos_token_id
    with torch.no_grad():
        return float(get_llm_for_sequence_regression(str(model), "reward")(ids, torch.ones_like(ids)))


@pytest.fixture(scope="module")
def normal_model(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good reward model, with mean and std of its scores."""
    folder = tmp_path_factory.mktemp("normal") / "reward"
    shutil.copytree(models / "reward", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mean": 0.5, "std": 0.25}))
    return folder


@pytest.fixture(scope="module")
def server(normal_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address and process of a server that asks for a token and normalizes."""
    (token_file := tmp_path_factory.mktemp("secret") / "token").write_text(f"{TOKEN}\n")
    options = {"reward_pretrain": normal_model, "port": 0, "token_file": token_file, "max_batch_size": 2, "max_len": 20}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    process = subprocess.Popen(
        [sys.executable, "-m", "openppo.cli.serve_rm", *arguments, "--normalize_reward"],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/get_reward", line):
            break
    else:
        pytest.fail("".join(lines))
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    yield found[1], process
    process.kill()
    process.wait()


def ask(url: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_scores_texts_as_the_model_does_alone(
    server: tuple[str, subprocess.Popen[str]], normal_model: Path
) -> None:
    texts = ["how are you fine<eos>", "<pad><pad>short", "a<eos><eos>\n", "x" * 30 + "abc", ""]
    read = ["how are you fine<eos>", "short<eos>", "a<eos>", "x" * 16 + "abc<eos>", "<eos>"]
    status, answer = ask(f"{server[0]}/get_reward", {"query": texts, "prompts": [""] * 5, "labels": [None] * 5})
    expected = [(score_alone(normal_model, text) - 0.5) / 0.25 for text in read]
    assert status == 200
    np.testing.assert_allclose(answer["rewards"], expected, atol=1e-5)
    assert ask(f"{server[0]}/", {"query": texts[:1]})[1]["rewards"] == pytest.approx(expected[:1], abs=1e-5)


def test_our_client_and_our_server_agree(
    server: tuple[str, subprocess.Popen[str]], normal_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    tokenizer = AutoTokenizer.from_pretrained(normal_model)
    trajectories = []
    for prompt, response in (("how are you", " fine<eos>"), ("a", "<eos>"), ("hi", " there<eos>")):
        prompt_ids, ids = (tokenizer(text)["input_ids"] for text in (prompt, response))
        mask, zeros = [True] * len(prompt_ids + ids), [0] * len(prompt_ids + ids)
        end, of = FinishReason.STOP, Prompt(prompt, prompt_ids)
        trajectories.append(Trajectory(prompt_ids + ids, mask, [0.0] * len(mask), zeros, end, of, group=0))
    url, token_file = f"{server[0]}/get_reward", str(tmp_path / "token")
    source = RewardConfig(remote_rm_url=url, remote_rm_token_file=token_file, remote_rm_batch_size=2)
    scorer = RemoteScorer(source, tokenizer)
    scorer.check()
    expected = [(score_alone(normal_model, tokenizer.decode(t.token_ids)) - 0.5) / 0.25 for t in trajectories]
    np.testing.assert_allclose([s.rewards["reward"] for s in scorer.score(trajectories)], expected, atol=1e-5)


def test_a_server_says_how_it_is_asks_for_its_token_and_ends_cleanly(
    server: tuple[str, subprocess.Popen[str]], normal_model: Path
) -> None:
    assert ask(f"{server[0]}/health") == (200, {"status": "ok", "model": str(normal_model)})
    for token in (None, "wrong"):
        assert ask(f"{server[0]}/health", token=token) == (200, {"status": "ok"}), "a path is nobody else's business"
        assert ask(f"{server[0]}/get_reward", {"query": ["a"]}, token=token)[0] == 401
    server[1].send_signal(signal.SIGTERM)
    assert server[1].wait(60) == 0
