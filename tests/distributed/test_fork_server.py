"""Forked programs do what started ones do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import logged
from tests.fork_server import Launcher

PPO = """train_ppo --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --rollout_batch_size 8 --train_batch_size 4 --generate_max_len 6"""
RUNS = {
    "PPO on one rank": (0, PPO),
    "ZeRO-2 in bfloat16": (2, f"{PPO} --zero_stage 2 --bf16 --enable_ema"),
    "four ranks": (4, f"{PPO} --zero_stage 3 --lora_rank 4 --max_epochs 2"),
    "SFT": (2, "train_sft --pretrain {tiny}/actor --train_batch_size 10 --dataset {tiny}/sft.jsonl --zero_stage 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_forked_run_trains_what_a_started_one_trains(
    run: str, tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    ranks, line = RUNS[run]
    command, *flags = line.format(tiny=tiny).split()
    for name in ("forked", "started"):
        more = [*flags, "--save_path", tmp_path / name]
        launch(ranks, "-m", f"openppo.cli.{command}", *more, real=name == "started")
    forked, started = (tmp_path / name for name in ("forked", "started"))
    assert logged(forked) == logged(started)
    for file in started.glob("*.safetensors"):
        assert (forked / file.name).read_bytes() == file.read_bytes()


SHOW = """
import json, os, sys, tempfile, torch
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], __name__, sys.path[0], torch.get_num_threads(),
                  tempfile.gettempdir(), sys.stdin.read(), os.environ.get("RANK")]))
"""


@pytest.mark.parametrize("words", [["-c", SHOW, "b"], ["-c", "import os; os.kill(os.getpid(), 9)"], ["-m", "missing"]])
def test_a_forked_process_has_the_state_and_end_of_a_started_one(
    words: list[str], tmp_path: Path, launcher: Launcher
) -> None:
    same: dict[str, Any] = {"cwd": tmp_path, "separate": True, "GIVEN": "a", "TMPDIR": str(tmp_path)}
    forked, started = (launcher.run(words, real=real, **same) for real in (False, True))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]
