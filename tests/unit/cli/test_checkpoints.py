"""What a start of a command does to the checkpoints of an earlier run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunCommand = Callable[..., Any]
PPO = "train_ppo --prompt_data data.jsonl --generate_max_len 4 --rollout_batch_size 1 --train_batch_size 1"
STARTS = {
    "weights of train_sft": ("train_sft --pretrain {models}/broken_weights --dataset data.jsonl", "--pretrain"),
    "weights of train_ppo": (
        PPO + " --pretrain {models}/broken_weights --reward_pretrain {models}/reward",
        "--pretrain",
    ),
    "reward server": (
        PPO + " --pretrain {models}/actor --remote_rm_url http://127.0.0.1:9 --remote_rm_retries 0",
        "--remote_rm_url",
    ),
}


@pytest.mark.parametrize(("start", "said"), STARTS.values(), ids=STARTS)
def test_a_start_that_fails_leaves_an_earlier_runs_checkpoints_where_they_are(
    start: str, said: str, models: Path, tmp_path: Path, run_in_process: RunCommand
) -> None:
    """Nobody who forgot --load_checkpoint would find them under the same name again."""
    command, *flags = start.format(models=models).split()
    (tmp_path / "data.jsonl").write_text(json.dumps({"input": "a b", "output": "c"}) + "\n")
    checkpoints = tmp_path / "run" / f"checkpoints_{command.removeprefix('train_')}"
    (checkpoints / "step_00000004").mkdir(parents=True)
    ended = run_in_process(command, *flags, "--save_path", "run")
    assert ended.code == 2
    assert f"error: {said}" in ended.stderr
    assert (checkpoints / ".lock").exists(), "it failed before it looked at checkpoints"
    assert (checkpoints / "step_00000004").is_dir()
