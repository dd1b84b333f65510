"""The example of a loop of one's own, run as its docstring says: it teaches a half-trained model to sort letters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = Path(__file__).parents[2]
STEPS = 20
SFT = """--pretrain data/model --dataset data/sft.jsonl --save_path sft --seed 1 --learning_rate 2e-3 --max_steps 42
    --train_batch_size 32 --micro_train_batch_size 16 --max_len 32"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data`` of the quickstart, and ``sft``, a model that has seen some of them."""
    folder = tmp_path_factory.mktemp("own_loop")
    run(folder, str(REPO / "examples/sort_letters.py"), "make", "--out", "data", "--seed", "1")
    run(folder, "-m", "openppo.cli.train_sft", *SFT.split())
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What Python prints, which must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def test_a_loop_of_ones_own_teaches_a_model_to_sort_letters(workshop: Path) -> None:
    arguments = f"--model sft --data data --save_path trained --steps {STEPS}".split()
    printed = run(workshop, str(REPO / "examples/own_loop.py"), *arguments)
    rewards = [float(number) for number in re.findall(r"^step \d+: reward ([\d.]+), KL", printed, flags=re.MULTILINE)]
    assert len(rewards) == STEPS
    before, after = map(float, re.findall(r"^exact match \w+ ([\d.]+)$", printed, flags=re.MULTILINE))
    assert rewards[-1] - rewards[0] > 0.1
    assert after - before > 0.1

    model, tokenizer = (auto.from_pretrained(workshop / "trained") for auto in (AutoModelForCausalLM, AutoTokenizer))
    answer = model.generate(**tokenizer("hgfed>", return_tensors="pt"), max_new_tokens=16, do_sample=False)
    assert len(tokenizer.decode(answer[0], skip_special_tokens=True)) > len("hgfed>")
