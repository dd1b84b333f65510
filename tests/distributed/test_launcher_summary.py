"""torchrun's summary, the last that a failed run prints, repeats the line that names the cause."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., str]
PPO = """-m openppo.cli.train_ppo --pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --reward_fn reward.py
    --generate_max_len 8 --rollout_batch_size 4 --train_batch_size 4"""
RAISES_ON_RANK_1 = """
import os

def reward_fn(responses):
    return [1 / (os.environ["RANK"] == "0")] * len(responses)
"""
OWN_LOOP = """
from openppo.config import TrainPPOConfig, from_options
from openppo.trainer import build_ppo_trainer

config = from_options(TrainPPOConfig, pretrain="{tiny}/actor", prompt_data="d", reward_fn="f.py", train_batch_size=3)
build_ppo_trainer(config)
"""
INDIVISIBLE = "--train_batch_size 3 does not divide among 2 ranks: use a multiple of 2."


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--gamma much", "Error parsing --gamma: could not convert string to float: 'much'"),
        ("--gama 1", "unknown flag --gama; did you mean --gamma?"),
        ("--train_batch_size 3", INDIVISIBLE),
        (
            "",
            "rank 1 raised RuntimeError: --reward_fn reward.py raised ZeroDivisionError('division by zero')",
        ),
    ],
)
def test_the_summary_repeats_the_error_of_a_command(
    flags: str, cause: str, tiny: Path, tmp_path: Path, launch: Launch
) -> None:
    (tmp_path / "reward.py").write_text(RAISES_ON_RANK_1)
    words = f"{PPO} {flags}".replace("{tiny}", str(tiny)).split()
    printed = launch(2, *words, cwd=tmp_path, status=1, real=True)
    assert root_cause(printed).startswith(cause), printed
    assert "--load_checkpoint" not in printed, "no checkpoint was written"


def test_the_summary_repeats_the_error_of_an_own_loop(
    tiny: Path, tmp_path: Path, launch: Launch
) -> None:
    (tmp_path / "loop.py").write_text(OWN_LOOP.replace("{tiny}", str(tiny)))
    printed = launch(2, "loop.py", cwd=tmp_path, status=1, real=True)
    assert root_cause(printed) == f"ValueError: {INDIVISIBLE}", printed
    assert "[rank1]: ValueError: " in printed, "the traceback is printed as before"


def root_cause(printed: str) -> str:
    """The message of the failure that torchrun observed first."""
    return re.findall(
        r"^  traceback : (.*)", printed.partition("Root Cause")[2], flags=re.MULTILINE
    )[0]
