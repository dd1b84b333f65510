"""A loss or gradient that is not finite on one rank leaves every rank as if that optimizer step had not been tried."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("run_resume.py")
PPO = """--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --rollout_batch_size 12 --train_batch_size 4 --micro_train_batch_size 1
    --generate_max_len 6 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --enable_ema"""

SETUPS = {
    "zero0": "--zero_stage 0",
    "zero1": "--zero_stage 1",
    "zero2": "--zero_stage 2",
    "zero3": "--zero_stage 3",
    "bf16-zero1": "--zero_stage 1 --bf16",
    "bf16-zero2": "--zero_stage 2 --bf16",
    "bf16-zero3": "--zero_stage 3 --bf16",
    "offload": "--zero_stage 2 --adam_offload",
    "without-clipping": "--zero_stage 2 --max_norm 0",
    "critic-at-once": "--zero_stage 2 --train_batch_size 12",
}
HOWS = ("nan", "infinite loss", "infinite gradient")
TRIED = [(name, how) for name in SETUPS for how in (HOWS if name in ("zero0", "zero2", "zero3") else HOWS[:1])]


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Path:
    """All setups with one spoiled step each: the fourth of the actor, or the second of the critic."""
    folder = tmp_path_factory.mktemp("not_finite")
    cases = []
    for i, (name, more) in enumerate(SETUPS.items()):
        for how in ("left out", *(how for tried, how in TRIED if tried == name)):
            role, call = ("one-pass critic", 2) if name == "critic-at-once" else (("actor", 4), ("critic", 2))[i % 2]
            (folder / f"{name}-{how}").mkdir()
            cases.append(
                {
                    "name": f"{name}-{how}",
                    "command": "train_ppo",
                    "arguments": f"{PPO.replace('{tiny}', str(tiny))} {more}".split(),
                    "stop_at": 0,
                    "poison": {"role": role, "calls": [call], "rank": 1, "how": how},
                }
            )
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, SCRIPT, folder / "cases.json", folder, "whole")
    return folder


@pytest.mark.parametrize(("setup", "how"), TRIED)
def test_the_step_is_as_if_it_had_not_been_tried(
    runs: Path, left_by: Callable[[Path], Any], setup: str, how: str
) -> None:
    got, want = (runs / f"{setup}-{kind}" / "model" for kind in (how, "left out"))
    spoiled, left_out = left_by(got), left_by(want)
    assert spoiled == left_out
    assert [line["skipped_steps"] for line in spoiled.metrics] in ([0.0, 1.0], [1.0, 1.0])


def test_the_batch_of_a_skipped_step_is_kept_by_each_rank(runs: Path) -> None:
    files = sorted((runs / "zero2-nan" / "model" / "skipped").iterdir())
    assert [file.name for file in files] == [
        f"global_step_2_optimizer_step_1_actor_rank{rank}.safetensors" for rank in (0, 1)
    ]
    tensors = load_file(files[1])
    assert {"0/sequences", "0/advantages", "1/log_probs"} <= tensors.keys()
    assert {"documents/0/sequences", "documents/0/loss_mask"} <= tensors.keys(), "the gradient is of both"


def test_a_step_of_supervised_training_leaves_the_weights_on_all_ranks(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    common = f"""--pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --learning_rate 1e-3 --lr_scheduler constant
        --lr_warmup_ratio 0 --train_batch_size 4 --micro_train_batch_size 2 --zero_stage 2 --logging_steps 1"""
    poison = {"role": "model", "calls": [2], "rank": 1, "how": "nan"}
    cases = [
        {"name": name, "command": "train_sft", "arguments": f"{common} --max_steps {steps}".split(), "stop_at": 0}
        for name, steps in (("one", 1), ("spoiled", 2))
    ]
    cases[1]["poison"] = poison
    for case in cases:
        (tmp_path / str(case["name"])).mkdir()
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    output = launch(2, SCRIPT, tmp_path / "cases.json", tmp_path, "whole")
    one, spoiled = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "spoiled"))
    assert all(spoiled[name].equal(tensor) for name, tensor in one.items())
    lines = (tmp_path / "spoiled" / "model" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped_steps"] for line in lines] == [0.0, 1.0]
    assert "a loss or the gradient of the model was not finite in step 2" in output
    kept = sorted(file.name for file in (tmp_path / "spoiled" / "model" / "skipped").iterdir())
    assert kept == [f"step_2_model_rank{rank}.safetensors" for rank in (0, 1)]


def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    (tmp_path / "case").mkdir()
    case = {
        "name": "case",
        "command": "train_ppo",
        "arguments": [*PPO.replace("{tiny}", str(tiny)).split(), "--max_skipped_steps", "2"],
        "stop_at": 0,
        "poison": {"role": "critic", "calls": [1, 3, 4], "rank": 0, "how": "nan"},
    }
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    output = launch(2, SCRIPT, tmp_path / "cases.json", tmp_path, "whole", status=1)
    assert "FloatingPointError: a loss or the gradient of the critic was not finite in global step 2" in output
    assert "2 optimizer steps in a row were skipped (--max_skipped_steps). Lower the learning rate" in output
    assert "this optimizer step is skipped on all ranks" in output
