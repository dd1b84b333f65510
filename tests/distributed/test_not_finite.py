"""A loss or gradient that is not finite on one rank leaves every rank as if that optimizer step had not been tried."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.runs import OPTIONS, left_by, logged

PPO = """--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --rollout_batch_size 12 --train_batch_size 4 --micro_train_batch_size 1
    --generate_max_len 6 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --ema_beta 0.992"""
SFT = """--pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --learning_rate 1e-3 --lr_scheduler constant
    --lr_warmup_ratio 0 --train_batch_size 4 --micro_train_batch_size 2 --zero_stage 2 --logging_steps 1"""
SETUPS = {  # flags and the model whose fourth or second step is spoiled
    "zero0": ("--zero_stage 0", "actor"),
    "zero2": ("--zero_stage 2", "actor"),
    "zero3": ("--zero_stage 3", "critic"),
    "bf16-zero1": ("--zero_stage 1 --bf16", "critic"),
    "bf16-zero3": ("--zero_stage 3 --bf16", "actor"),
    "offload": ("--zero_stage 2 --adam_offload", "critic"),
    "without-clipping": ("--zero_stage 2 --max_norm 0", "actor"),
    "critic-at-once": ("--zero_stage 2 --train_batch_size 12", "critic"),
}
HOWS = ("nan", "infinite loss", "infinite gradient")
TRIED = [(name, how) for name in SETUPS for how in (HOWS if name == "zero2" else HOWS[:1])]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, run_cases: Callable[..., str]
) -> tuple[Path, str]:
    """All setups with one spoiled step each, and SFT with a spoiled second step and with one step alone."""
    folder, cases = tmp_path_factory.mktemp("not_finite"), {}
    for name, (more, role) in SETUPS.items():
        for how in ("left out", *(how for tried, how in TRIED if tried == name)):
            spoiled = {"role": role, "calls": [4 if role == "actor" else 2], "rank": 1, "how": how}
            cases[f"{name}-{how}"] = {"arguments": f"{PPO} {more}", "poison": spoiled}
    sft = {"command": "train_sft", "arguments": f"{SFT} --max_steps 2"}
    cases["sft"] = sft | {"poison": {"role": "model", "calls": [2], "rank": 1, "how": "nan"}}
    cases["sft one step"] = sft | {"arguments": f"{SFT} --max_steps 1"}
    return folder, run_cases(2, folder, cases, "whole")


@pytest.mark.parametrize(("setup", "how"), TRIED)
def test_the_step_is_as_if_it_had_not_been_tried(folder, setup, how):
    spoiled, left_out = (
        left_by(folder[0] / f"{setup}-{kind}" / "model") for kind in (how, "left out")
    )
    assert spoiled == left_out
    assert [line["skipped_steps"] for line in spoiled.metrics] in ([0.0, 1.0], [1.0, 1.0])


def test_the_batch_of_a_skipped_step_is_kept_by_each_rank(folder):
    files = sorted((folder[0] / "zero2-nan" / "model" / "skipped").iterdir())
    assert [file.name for file in files] == [
        f"global_step_2_optimizer_step_1_actor_rank{rank}.safetensors" for rank in (0, 1)
    ]
    tensors = load_file(files[1])
    assert {"samples/0/sequences", "samples/0/advantages", "samples/1/log_probs"} <= tensors.keys()
    assert {"documents/0/sequences", "documents/0/loss_mask"} <= tensors.keys(), (
        "the gradient is of both"
    )


def test_a_step_of_supervised_training_leaves_the_weights_on_all_ranks(folder):
    path, output = folder
    one, spoiled = (
        load_file(path / name / "model" / "model.safetensors") for name in ("sft one step", "sft")
    )
    assert all(spoiled[name].equal(tensor) for name, tensor in one.items())
    assert [line["skipped_steps"] for line in logged(path / "sft" / "model")] == [0.0, 1.0]
    assert "a loss or the gradient of the model was not finite in step 2" in output
    kept = sorted(file.name for file in (path / "sft" / "model" / "skipped").iterdir())
    assert kept == [f"step_2_model_rank{rank}.safetensors" for rank in (0, 1)]


def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(tmp_path, run_cases):
    spoiled = {"role": "critic", "calls": [1, 3, 4], "rank": 0, "how": "nan"}
    case = {"arguments": f"{PPO} --config {OPTIONS}/two_skipped_steps.yaml", "poison": spoiled}
    output = run_cases(2, tmp_path, {"case": case}, "whole", status=1)
    assert (
        "FloatingPointError: a loss or the gradient of the critic was not finite in global step 2"
        in output
    )
    assert (
        "2 optimizer steps in a row were skipped (max_skipped_steps). Lower the learning rate"
        in output
    )
    assert "this optimizer step is skipped on all ranks" in output
