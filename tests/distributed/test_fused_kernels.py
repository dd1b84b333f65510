"""Runs with fused kernels train as plain ones do, and say what is fused; a stand-in has the library's place."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import logged

PROGRAM = """
from openppo.strategy import comm, fused_bindings, fused_forwards
from tests.unit.strategy.test_fused_kernels import GELU, Joined, Norm, Rotary, SiLU

kernels = fused_forwards.Kernels(Norm, Rotary, SiLU, GELU, Joined)
for module in (fused_forwards, fused_bindings):
    module.load_kernels = lambda: kernels
    module.kernel_errors = lambda: fused_forwards.ERRORS
comm.has_kernels = lambda device, comm: True
from openppo.cli.train_ppo import main
main()
"""
COMPARED = """reward kl policy_loss value_loss actor_grad_norm critic_grad_norm
    response_length""".split()


@pytest.mark.parametrize(
    "flags",
    [
        "--zero_stage 3 --gradient_checkpointing",
        pytest.param("--zero_stage 2 --lora_rank 2", marks=pytest.mark.slow),
    ],
)
def test_a_fused_run_trains_as_a_plain_one(
    flags: str, tiny: Path, tmp_path: Path, launch: Any
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(name: str, *more: str) -> str:
        options = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/reward
            --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 4 --train_batch_size 4
            --generate_max_len 6 --max_samples 8 --save_steps 1 --actor_learning_rate 1e-3
            --critic_learning_rate 1e-3 --save_path {tmp_path / name} {flags}"""
        return launch(2, tmp_path / "program.py", *options.split(), *more)

    printed = run("fused").replace("[openppo]", "")
    printed = " ".join(printed.split())  # the table at the start breaks lines
    assert printed.count("fused RMSNorm, gated MLP, rotary embedding") >= 3, "actor, critic, reward"
    assert "fused RMSNorm" not in run("plain", "--fused_kernels", "off")
    pairs = zip(logged(tmp_path / "fused"), logged(tmp_path / "plain"), strict=True)
    for fused, plain in pairs:
        for name in COMPARED:
            assert fused[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-6), name

    resumed = run("fused", "--fused_kernels", "off", "--load_checkpoint", "--num_episodes", "2")
    assert "--fused_kernels auto -> off" in resumed
