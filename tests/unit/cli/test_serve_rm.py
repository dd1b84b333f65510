"""serve_rm as a real process, compared with the model itself."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from openppo.config import RewardConfig
from openppo.models import get_llm_for_sequence_regression
from openppo.rewards import RemoteScorer
from openppo.types import FinishReason, ModelInputs, Prompt
from tests.fork_server import PYTHON_PATH
from tests.samples import one_segment


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """The good reward model, with mean and std of its scores."""
    folder = Path(shutil.copytree(models / "reward", tmp_path / "reward"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mean": 0.5, "std": 0.25}))
    return folder


def score_alone(model: Path, text: str) -> float:
    """The normalized score of one text, which ends with EOS, without padding or batch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert ids[0, -1] == tokenizer.eos_token_id
    with torch.no_grad():
        score = float(
            get_llm_for_sequence_regression(str(model), "reward")(
                ModelInputs(ids, torch.ones_like(ids))
            )
        )
    return (score - 0.5) / 0.25


def test_a_server_scores_as_the_model_alone_for_our_client_too(model, tmp_path):
    (tmp_path / "token").write_text("open sesame\n")
    flags = f"--reward_pretrain {model} --port 0 --token_file {tmp_path}/token --max_batch_size 2 --max_len 20"
    process = subprocess.Popen(
        [sys.executable, "-m", "openppo.cli.serve_rm", *flags.split(), "--normalize_reward"],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        stderr=(tmp_path / "stderr").open("w"),
    )
    try:
        said = ""
        while process.poll() is None and "/get_reward" not in said:
            time.sleep(0.1)
            said = (tmp_path / "stderr").read_text()
        url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]

        texts = ["how are you fine<eos>", "<pad><pad>short", "a<eos><eos>\n", "x" * 30 + "abc", ""]
        read = ["how are you fine<eos>", "short<eos>", "a<eos>", "x" * 16 + "abc<eos>", "<eos>"]
        body = json.dumps({"query": texts, "prompts": [""] * 5, "labels": [None] * 5}).encode()
        request = urllib.request.Request(
            f"{url}/get_reward", body, {"Authorization": "Bearer open sesame"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            rewards = json.load(answer)["rewards"]
        np.testing.assert_allclose(rewards, [score_alone(model, text) for text in read], atol=1e-5)

        tokenizer = AutoTokenizer.from_pretrained(model)
        samples = []
        for prompt, response in (
            ("how are you", " fine<eos>"),
            ("a", "<eos>"),
            ("hi", " there<eos>"),
        ):
            ids, prompt_ids = (tokenizer(text)["input_ids"] for text in (prompt + response, prompt))
            n = len(ids)
            sample = one_segment(
                ids,
                [True] * n,
                log_probs=[0.0] * n,
                versions=[0] * n,
                finish_reason=FinishReason.STOP,
                prompt=Prompt(prompt, prompt_ids),
                group=0,
            )
            samples.append(sample)
        options = {"remote_rm_token_file": str(tmp_path / "token"), "remote_rm_batch_size": 2}
        scorer = RemoteScorer(RewardConfig(remote_rm_url=f"{url}/get_reward", **options), tokenizer)
        scorer.check()
        expected = [
            score_alone(model, tokenizer.decode(sample.last.token_ids)) for sample in samples
        ]
        np.testing.assert_allclose(
            [score.rewards["reward"] for score in scorer.score(samples)], expected, atol=1e-5
        )

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
