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


CAN_COMPILE = shutil.which("g++") is not None and " " not in torch.__file__
# With a limit on the buffer, though it holds all samples, the critic is asked for values before training.
LIMIT = "--buffer_limit 12"
WAYS = {  # the slower flags, the faster ones, what both have
    "compile": ("", "--compile", "--zero_stage 2 --gradient_checkpointing"),
    "old log-probs": ("--old_log_probs recompute", "", "--zero_stage 3 --max_epochs 2"),
    "values": (LIMIT, "", "--train_batch_size 12 --max_epochs 2 --zero_stage 0"),
    "values before policy": (LIMIT, "", "--train_batch_size 12 --value_pretrain_steps 1 --zero_stage 1"),
    "values with checkpointing": (LIMIT, "", "--train_batch_size 12 --gradient_checkpointing --zero_stage 2"),
    "values with offload": (
        LIMIT,
        "",
        "--train_batch_size 12 --max_epochs 2 --lambd 0.9 --offload_idle --zero_stage 3",
    ),
}


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Path:
    """What each way left behind, ``NAME fast`` and ``NAME slow``, in one launch."""
    folder = tmp_path_factory.mktemp("ways")
    common = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
        --rollout_batch_size 12 --train_batch_size 6 --micro_train_batch_size 2 --generate_max_len 12
        --lr_warmup_ratio 0 --lr_scheduler constant --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"""
    cases = [
        {"name": f"{name} {speed}", "command": "train_ppo", "arguments": f"{common} {more} {flag}".split()}
        | {"n_rows": 11, "n_steps": 2}
        for name, (slow, fast, more) in WAYS.items()
        for speed, flag in (("slow", slow), ("fast", fast))
        if fast != "--compile" or CAN_COMPILE
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, SCRIPT, folder / "cases.json", folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_a_faster_way_trains_alike(tiny: Path, folder: Path, way: str) -> None:
    if "compile" in way and not CAN_COMPILE:
        pytest.skip("torch.compile needs a C++ compiler on CPUs, and no space in torch's path")
    slow, fast = folder / f"{way} slow", folder / f"{way} fast"
    slowly, quickly = (json.loads((run / "result.json").read_text()) for run in (slow, fast))
    assert [[s["response"] for s in step] for step in quickly["samples"]] == [
        [s["response"] for s in step] for step in slowly["samples"]
    ]
    if way != "old log-probs":  # which decides what is measured
        for found, expected in zip(quickly["metrics"], slowly["metrics"], strict=True):
            measured = {name: value for name, value in expected.items() if not name.startswith(("time/", "speed/"))}
            assert {name: found.get(name) for name in measured} == pytest.approx(measured, rel=1e-2, abs=1e-4)
    for role, start in (("model", "actor"), ("model_critic", "reward")):
        got, want, before = (load_file(run / "model.safetensors") for run in (fast / role, slow / role, tiny / start))
        update = torch.cat([(want[name] - before[name]).flatten() for name in want])
        difference = torch.cat([(got[name] - want[name]).flatten() for name in want])
        assert update.norm() > 0
        assert difference.norm() <= TOLERANCE * update.norm(), role
