"""What makes training faster does not change it: compiled layers, the engine's log-probs for the old policy's, and
the critic's values from the forward that is trained on.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("run_steps.py")
TOLERANCE = 1e-3
"""Relative, of the norm of what training changed, as in test_split.py."""


COMPILED = pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch.compile needs a C++ compiler on CPUs, and no space in torch's path",
)


@pytest.mark.parametrize(
    ("slow", "fast", "more"),
    [
        pytest.param("", "--compile", "--zero_stage 2", marks=[COMPILED, pytest.mark.slow]),
        pytest.param("", "--compile", "--zero_stage 0 --gradient_checkpointing", marks=COMPILED),
        ("--old_log_probs recompute", "", "--zero_stage 3 --max_epochs 2"),
        # With a limit on the buffer, though it holds all samples, the critic is asked for values before training.
        ("--buffer_limit 12", "", "--train_batch_size 12 --max_epochs 2 --zero_stage 0"),
        ("--buffer_limit 12", "", "--train_batch_size 12 --value_pretrain_steps 1 --zero_stage 1"),
        ("--buffer_limit 12", "", "--train_batch_size 12 --gradient_checkpointing --zero_stage 2"),
        ("--buffer_limit 12", "", "--train_batch_size 12 --max_epochs 2 --lambd 0.9 --offload_idle --zero_stage 3"),
    ],
)
def test_a_faster_way_trains_alike(
    tiny: Path, tmp_path: Path, launch: Callable[..., str], slow: str, fast: str, more: str
) -> None:
    arguments = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
        --rollout_batch_size 12 --train_batch_size 6 --micro_train_batch_size 2 --generate_max_len 12
        --lr_warmup_ratio 0 --lr_scheduler constant --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 {more}"""
    cases = [
        {"name": name, "command": "train_ppo", "arguments": (arguments + flag).split(), "n_rows": 11, "n_steps": 2}
        for name, flag in (("slow", f" {slow}"), ("fast", f" {fast}"))
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    launch(2, SCRIPT, tmp_path / "cases.json", tmp_path)

    slowly, quickly = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("slow", "fast"))
    assert [[s["response"] for s in step] for step in quickly["samples"]] == [
        [s["response"] for s in step] for step in slowly["samples"]
    ]
    if not slow.startswith("--old_log_probs"):  # which decides what is measured
        for found, expected in zip(quickly["metrics"], slowly["metrics"], strict=True):
            measured = {name: value for name, value in expected.items() if not name.startswith(("time/", "speed/"))}
            assert {name: found.get(name) for name in measured} == pytest.approx(measured, rel=1e-2, abs=1e-4)
    for role, start in (("model", "actor"), ("model_critic", "reward")):
        got, want, before = (
            load_file(folder / "model.safetensors")
            for folder in (tmp_path / "fast" / role, tmp_path / "slow" / role, tiny / start)
        )
        update = torch.cat([(want[name] - before[name]).flatten() for name in want])
        difference = torch.cat([(got[name] - want[name]).flatten() for name in want])
        assert update.norm() > 0
        assert difference.norm() <= TOLERANCE * update.norm(), role
