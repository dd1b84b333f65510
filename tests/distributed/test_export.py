"""The model made of a checkpoint is, bit for bit, what the run saved at that step."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openppo.config import CheckpointModelConfig, MergeConfig
from openppo.models.merge_lora import LoRAMerge
from openppo.trainer.resume.export import Export

Launch = Callable[..., str]
PPO = """-m openppo.cli.train_ppo --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --max_samples 16
    --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2
    --micro_rollout_batch_size 4 --generate_max_len 6 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2
    --lr_warmup_ratio 0 --save_steps 1 --save_hf_ckpt --save_value_network --zero_stage 3"""
RUNS = {"averaged": "--enable_ema --ema_beta 0.5 --bf16", "lora": "--lora_rank 4 --critic_lora_rank 2"}


def files(folder: Path) -> dict[str, bytes]:
    """By name; peft writes target modules in the order of a set, and transformers whether it was offline."""
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    found["tokenizer_config.json"] = re.sub(rb'"local_files_only": \w+', b"", found["tokenizer_config.json"])
    if "adapter_config.json" in found:
        described = json.loads(found["adapter_config.json"])
        described["target_modules"].sort()
        found["adapter_config.json"] = json.dumps(described).encode()
    return found


def export(checkpoint: Path, folder: Path, **options: Any) -> Path:
    Export(CheckpointModelConfig(str(checkpoint), str(folder), **options)).fit()
    return folder


@pytest.fixture(scope="module", params=RUNS)
def ppo_run(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch
) -> Any:
    """Name and folder of two steps on two ranks with ZeRO-3."""
    folder = tmp_path_factory.mktemp(request.param)
    arguments = f"{PPO} {RUNS[request.param]}".replace("{tiny}", str(tiny)).split()
    launch(2, *arguments, "--save_path", folder / "model")
    return request.param, folder


def test_an_exported_policy_is_what_the_run_saved(ppo_run: Any, tmp_path: Path) -> None:
    _, folder = ppo_run
    checkpoints = folder / "model" / "checkpoints_ppo"
    first = export(checkpoints / "step_00000001", tmp_path / "first")
    newest = export(checkpoints, tmp_path / "newest")
    assert files(first) == files(checkpoints / "step_00000001" / "model")
    assert files(newest) == files(folder / "model")
    assert files(first) != files(newest)
    AutoTokenizer.from_pretrained(newest)


def test_an_exported_critic_is_what_the_run_saved(ppo_run: Any, tmp_path: Path) -> None:
    _, folder = ppo_run
    exported = export(folder / "model" / "checkpoints_ppo" / "latest", tmp_path / "critic", role="critic")
    assert files(exported) == files(folder / "model_critic")


def test_an_exported_model_can_be_merged_and_rounded(ppo_run: Any, tmp_path: Path, tiny: Path) -> None:
    name, folder = ppo_run
    checkpoints = folder / "model" / "checkpoints_ppo"
    if name != "lora":
        with pytest.raises(ValueError, match="--merge: the run trained all weights"):
            export(checkpoints, tmp_path / "merged", merge=True)
        return
    merged = export(checkpoints, tmp_path / "merged", merge=True)
    LoRAMerge(MergeConfig(str(folder / "model"), str(tmp_path / "by_merge_lora"))).fit()
    assert files(merged) == files(tmp_path / "by_merge_lora")
    rounded = load_file(export(checkpoints, tmp_path / "rounded", merge=True, bf16=True) / "model.safetensors")
    assert all(rounded[key].equal(value.bfloat16()) for key, value in load_file(merged / "model.safetensors").items())
    moved = shutil.copytree(tiny / "actor", tmp_path / "moved")
    again = export(checkpoints, tmp_path / "again", merge=True, pretrain=str(moved))
    assert files(again) == files(merged)
    with pytest.raises(ValueError, match="--pretrain .* is not what the run started from: say where that is"):
        export(checkpoints, tmp_path / "wrong", pretrain=str(merged))


SUPERVISED = """--pretrain {tiny}/actor --train_batch_size 13 --micro_train_batch_size 4 --learning_rate 1e-2
    --max_epochs 1 --lr_warmup_ratio 0 --save_steps 1"""
COMMANDS = {
    "sft": "--dataset {tiny}/sft.jsonl --zero_stage 0",
    "rm": "--dataset {tiny}/preference.jsonl --prompt_key prompt --zero_stage 2",
    "prm": "--dataset {steps} --placeholder_token h --reward_tokens a b --bf16 --zero_stage 1",
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_so_it_is_after_supervised_training(kind: str, tiny: Path, tmp_path: Path, launch: Launch) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text(
        "".join(json.dumps({"input": f"{letter}hch", "labels": ["a", "b"]}) + "\n" for letter in "cdefg" * 5)
    )
    flags = f"{SUPERVISED} {COMMANDS[kind]}".replace("{tiny}", str(tiny)).replace("{steps}", str(steps))
    key = ["--label_key", "labels", "--input_key", "input"] if kind == "prm" else []
    launch(0, "-m", f"openppo.cli.train_{kind}", *flags.split(), *key, "--save_path", tmp_path / "model")
    exported = export(tmp_path / "model" / f"checkpoints_{kind}", tmp_path / "exported")
    found, saved = files(exported), files(tmp_path / "model")
    if kind == "rm":  # measured when the run saves
        described = json.loads(saved.pop("config.json"))
        assert described.pop("std") > 0
        described.pop("mean")
        assert json.loads(found.pop("config.json")) == described
    else:
        AutoModelForCausalLM.from_pretrained(exported)
    assert found == saved
