"""The model made of a checkpoint is, bit for bit, what the run saved at that step."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from openppo.config import ExportConfig, MergeLoRAConfig
from openppo.jobs.export import Export
from openppo.jobs.merge_lora import LoRAMerge

Launch = Callable[..., str]
PPO = """-m openppo.cli.train_ppo --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --max_samples 16
    --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2
    --micro_rollout_batch_size 4 --generate_max_len 6 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2
    --lr_warmup_ratio 0 --save_steps 1 --save_hf_ckpt --save_value_network --zero_stage 3"""
RUNS = {
    "averaged": "--ema_beta 0.5 --bf16",
    "lora": "--lora_rank 4 --critic_lora_rank 2",
}


def files(folder: Path) -> dict[str, bytes]:
    """By name; peft writes target modules in the order of a set, and transformers whether it was offline."""
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    found["tokenizer_config.json"] = re.sub(
        rb'"local_files_only": \w+', b"", found["tokenizer_config.json"]
    )
    if "adapter_config.json" in found:
        described = json.loads(found["adapter_config.json"])
        described["target_modules"].sort()
        found["adapter_config.json"] = json.dumps(described).encode()
    return found


def export(checkpoint: Path, folder: Path, **options: Any) -> Path:
    Export(ExportConfig(str(checkpoint), str(folder), **options)).fit()
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_an_exported_model_is_what_the_run_saved(name, tiny, tmp_path, launch):
    arguments = f"{PPO} {RUNS[name]}".replace("{tiny}", str(tiny)).split()
    launch(2, *arguments, "--save_path", tmp_path / "model")
    checkpoints = tmp_path / "model" / "checkpoints_ppo"
    first = export(checkpoints / "step_00000001", tmp_path / "first")
    newest = export(checkpoints, tmp_path / "newest")
    assert files(first) == files(checkpoints / "step_00000001" / "model")
    assert files(newest) == files(tmp_path / "model")
    assert files(first) != files(newest)
    critic = export(checkpoints / "latest", tmp_path / "critic", role="critic")
    assert files(critic) == files(tmp_path / "model_critic")
    if name != "lora":
        with pytest.raises(ValueError, match="--merge: the run trained all weights"):
            export(checkpoints, tmp_path / "merged", merge=True)
        return
    merged = export(checkpoints, tmp_path / "merged", merge=True)
    LoRAMerge(MergeLoRAConfig(str(tmp_path / "model"), str(tmp_path / "by_merge_lora"))).fit()
    found = files(merged)
    assert b"library_name: transformers" in found.pop("README.md"), "the other has no card yet"
    assert found == files(tmp_path / "by_merge_lora")


SUPERVISED = """--pretrain {tiny}/actor --train_batch_size 13 --micro_train_batch_size 4 --learning_rate 1e-2
    --max_epochs 1 --lr_warmup_ratio 0 --save_steps 1"""
COMMANDS = {
    "sft": "--dataset {tiny}/sft.jsonl --zero_stage 0",
    "rm": "--dataset {tiny}/preference.jsonl --prompt_key prompt --zero_stage 2",
    "prm": "--dataset steps.jsonl --placeholder_token h --reward_tokens a b --bf16 --zero_stage 1 --label_key labels "
    "--input_key input",
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_exported_model_is_what_supervision_saved(kind, tiny, tmp_path, launch):
    steps = [{"input": f"{letter}hch", "labels": ["a", "b"]} for letter in "cdefg" * 5]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    flags = f"{SUPERVISED} {COMMANDS[kind]} --save_path model".replace("{tiny}", str(tiny))
    launch(0, "-m", f"openppo.cli.train_{kind}", *flags.split(), cwd=tmp_path)
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
