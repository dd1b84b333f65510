"""An OpenRLHF 0.6.1 train_ppo command line: every flag of its parser is known, and does or says the right thing."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from openppo.cli.openrlhf import FOREIGN_FLAGS
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, declared_options, flat_dict

DOCUMENT = Path(__file__).parents[3] / "docs" / "openrlhf.md"
REQUIRED = ["--pretrain", "m", "--prompt_data", "d"]

# The flags of openrlhf/cli/train_ppo.py (0.6.1) in its order: name, OpenRLHF's default, arguments, their value here.
SAME: list[tuple[str, Any, str, Any]] = [
    ("save_path", "./ckpt", "out", "out"),
    ("save_steps", -1, "20", 20),
    ("save_hf_ckpt", False, "", True),
    ("max_ckpt_num", 3, "5", 5),
    ("ckpt_path", "./ckpt/checkpoints_ppo", "./ckpt/llama", "./ckpt/llama"),
    ("load_checkpoint", False, "", True),
    ("logging_steps", 1, "5", 5),
    ("eval_steps", -1, "-1", -1),
    ("num_episodes", 1, "2", 2),
    ("rollout_batch_size", 512, "1024", 1024),
    ("micro_rollout_batch_size", 8, "4", 4),
    ("max_epochs", 1, "3", 3),
    ("prompt_max_len", 1024, "512", 512),
    ("generate_max_len", 1024, "256", 256),
    ("max_samples", 1000000, "100000", 100000),
    ("max_norm", 1.0, "0.5", 0.5),
    ("l2", 0.0, "0.01", 0.01),
    ("ptx_coef", 0.05, "0.1", 0.1),
    ("eps_clip", 0.2, "0.3", 0.3),
    ("value_clip", 0.2, "0.4", 0.4),
    ("lambd", 0.95, "1", 1.0),
    ("gamma", 1, "0.99", 0.99),
    ("micro_train_batch_size", 4, "2", 2),
    ("train_batch_size", 128, "64", 64),
    ("normalize_reward", False, "", True),
    ("top_p", 1.0, "0.9", 0.9),
    ("temperature", 1.0, "0.7", 0.7),
    ("freezing_actor_steps", -1, "10", 10),
    ("n_samples_per_prompt", 1, "8", 8),
    ("save_value_network", False, "", True),
    ("actor_learning_rate", 1e-6, "5e-7", 5e-7),
    ("critic_learning_rate", 9e-6, "1e-5", 1e-5),
    ("lr_warmup_ratio", 0.03, "0.1", 0.1),
    ("kl_target", None, "0.1", 0.1),
    ("init_kl_coef", 0.01, "0", 0.0),
    ("kl_estimator", "k1", "k3", "k3"),
    ("adam_betas", (0.9, 0.95), "0.8 0.99", (0.8, 0.99)),
    ("reward_clip_range", (-10, 10), "-5 2.5", (-5.0, 2.5)),
    ("seed", 42, "7", 7),
    ("zero_stage", 2, "3", 3),
    ("gradient_checkpointing", False, "", True),
    ("bf16", False, "", True),
    ("enable_ema", False, "", True),
    ("zpg", 1, "8", 8),
    ("adam_offload", False, "", True),
    ("flash_attn", False, "", True),
    ("overlap_comm", False, "", True),
    ("advantage_estimator", "gae", "group_norm", "group_norm"),
    ("use_kl_loss", False, "", True),
    ("load_in_4bit", False, "", True),
    ("lora_rank", 0, "16", 16),
    ("lora_alpha", 16, "32", 32),
    ("target_modules", "all-linear", "q_proj v_proj", ("q_proj", "v_proj")),
    ("lora_dropout", 0, "0.1", 0.1),
    ("pretrain", None, "actor", "actor"),
    ("reward_pretrain", None, "reward", "reward"),
    ("remote_rm_url", None, "http://localhost:5000/get_reward", "http://localhost:5000/get_reward"),
    ("critic_pretrain", None, "critic", "critic"),
    ("value_head_prefix", "score", "value_head", "value_head"),
    ("prompt_data", None, "a,b", "a,b"),
    ("prompt_data_probs", "1.0", "0.4,0.6", "0.4,0.6"),
    ("prompt_split", "train", "part", "part"),
    ("pretrain_data", None, "texts", "texts"),
    ("pretrain_data_probs", "1.0", "0.5,0.5", "0.5,0.5"),
    ("pretrain_split", "train", "part", "part"),
    ("input_key", "input", "context_messages", "context_messages"),
    ("label_key", None, "answer", "answer"),
    ("input_template", None, "User:{}", "User:{}"),
    ("apply_chat_template", False, "", True),
    ("use_tensorboard", None, "tb", "tb"),
    ("use_wandb", None, "True", "True"),
    ("wandb_org", None, "us", "us"),
    ("wandb_group", None, "g", "g"),
    ("wandb_project", "openrlhf_train_ppo", "p", "p"),
    ("wandb_run_name", "ppo_<time>", "r", "r"),
]
DROPPED: list[tuple[str, str]] = [
    ("max_ckpt_mem", "100000000"),
    ("local_rank", "0"),
    ("actor_init_on_gpu", ""),
    ("aux_loss_coef", "0"),
    ("grad_accum_dtype", "fp32"),
    ("gradient_checkpointing_use_reentrant", ""),
    ("disable_fast_tokenizer", ""),
]
REFUSED: list[tuple[str, str, str]] = [
    ("disable_ds_ckpt", "", "--save_steps 0"),
    ("max_len", "2048", "--prompt_max_len and --generate_max_len"),
    ("aux_loss_coef", "0.01", "Leave it out"),
    ("grad_accum_dtype", "bf16", "float32"),
    ("use_ms", "", "--pretrain"),
]
DEFAULTS_THAT_DIFFER = {  # each is explained in the document
    "ckpt_path",
    "input_key",
    "max_samples",
    "pretrain",
    "pretrain_data_probs",
    "prompt_data",
    "prompt_data_probs",
    "target_modules",  # only in form: a tuple here
    "wandb_project",
    "wandb_run_name",
}
# examples/scripts/train_ppo_llama.sh of OpenRLHF 0.6.1
LLAMA = """
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture
    --save_path ./checkpoint/llama-3-8b-rlhf --save_steps -1 --logging_steps 1 --eval_steps -1
    --micro_train_batch_size 2 --train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 1024
    --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 2 --bf16
    --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01
    --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template
    --max_samples 100000 --normalize_reward --adam_offload --flash_attn --gradient_checkpointing --load_checkpoint
"""


def parse(*arguments: str) -> dict[str, Any]:
    """The options of a train_ppo command line by name, after the required ones."""
    return flat_dict(parse_options(TrainPPOConfig, [*REQUIRED, *arguments]))


def test_every_flag_of_the_parser_is_listed_once() -> None:
    names = {name for name, *_ in [*SAME, *DROPPED, *REFUSED]}
    assert len(names) == 85, "openrlhf/cli/train_ppo.py has 85 flags"
    assert {name for name, *_ in SAME} <= declared_options(TrainPPOConfig).keys()


@pytest.mark.parametrize(("name", "default", "arguments", "value"), SAME, ids=[name for name, *_ in SAME])
def test_flag_has_the_same_name_and_form(name: str, default: Any, arguments: str, value: Any, capsys: Any) -> None:
    assert parse(f"--{name}", *arguments.split())[name] == value
    assert capsys.readouterr().err == ""


def test_defaults_are_the_same_but_for_those_that_the_document_explains() -> None:
    ours = declared_options(TrainPPOConfig)
    differ = {name for name, default, *_ in SAME if ours[name].default != default}
    assert differ == DEFAULTS_THAT_DIFFER
    assert ours["pretrain"].default is ours["prompt_data"].default is MISSING


@pytest.mark.parametrize(("name", "value"), DROPPED, ids=[name for name, _ in DROPPED])
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_flag_without_a_meaning_here_is_dropped_with_one_line(name: str, value: str, form: str, capsys: Any) -> None:
    words = [f"--{name}={value}"] if form == "one word" and value else [f"--{name}", *value.split()]
    assert parse(*words, "--bf16") == parse("--bf16")
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == (0 if name == "local_rank" else 1)
    assert all(notice.startswith(f"--{name} ") and ": " in notice for notice in notices)


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_flag_whose_effect_cannot_be_had_is_refused_with_a_remedy(name: str, value: str, remedy: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(f"--{name}", *value.split())
    assert str(refused.value).startswith(f"--{name}")
    assert remedy in str(refused.value)


def test_flags_of_the_ray_trainer_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="--vllm_num_engines does not exist here: it is of .*train_ppo_ray"):
        parse("--vllm_num_engines", "4")


def test_no_flag_of_ours_is_taken_for_a_foreign_one() -> None:
    assert FOREIGN_FLAGS.keys() & declared_options(TrainPPOConfig).keys() == set()


def test_notices_come_from_rank_0_only(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    parse("--actor_init_on_gpu")
    assert capsys.readouterr().err == ""


def test_example_of_openrlhf_becomes_the_config_it_means(capsys: Any) -> None:
    config = parse_options(TrainPPOConfig, ["--local_rank=3", *LLAMA.split()])
    config.validate(world_size=8)
    given = {
        "pretrain": "OpenRLHF/Llama-3-8b-sft-mixture",
        "reward_pretrain": "OpenRLHF/Llama-3-8b-rm-mixture",
        "save_path": "./checkpoint/llama-3-8b-rlhf",
        "micro_train_batch_size": 2,
        "micro_rollout_batch_size": 4,
        "rollout_batch_size": 1024,
        "bf16": True,
        "actor_learning_rate": 5e-7,
        "prompt_data": "OpenRLHF/prompt-collection-v0.1",
        "input_key": "context_messages",
        "apply_chat_template": True,
        "max_samples": 100000,
        "normalize_reward": True,
        "adam_offload": True,
        "flash_attn": True,
        "gradient_checkpointing": True,
        "load_checkpoint": True,
    }  # all its other flags repeat defaults
    assert flat_dict(config) == parse() | given
    assert capsys.readouterr().err == ""


def test_document_has_every_flag() -> None:
    text = DOCUMENT.read_text()
    names = {name for name, *_ in [*SAME, *DROPPED, *REFUSED]}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
