"""Options: defaults as published, and errors that name the flag and the remedy."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import openppo.config
from openppo.config import (
    EvaluateConfig,
    GenerateConfig,
    MergeLoRAConfig,
    PPODataConfig,
    PPOModelConfig,
    ReportConfig,
    RewardConfig,
    ServeRMConfig,
    SupervisedConfig,
    TrackingConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    flat_dict,
    from_options,
    mask_credentials,
    parse_probs,
)

COMMON: dict[str, Any] = {
    # of all commands that train
    "save_path": "./ckpt",
    "ckpt_path": None,
    "save_steps": -1,
    "max_ckpt_num": 3,
    "load_checkpoint": False,
    "save_hf_ckpt": False,
    "keep_best": None,
    "max_skipped_steps": 10,
    "logging_steps": 1,
    "heartbeat_timeout": 45.0,
    "stall_timeout": 2700.0,
    "train_batch_size": 128,
    "micro_train_batch_size": 4,
    "max_epochs": 1,
    "max_norm": 1.0,
    "lora_rank": 0,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ("all-linear",),
    "load_in_4bit": False,
    "eval_split": "test",
    "eval_steps": -1,
    "pretrain": "m",
    "flash_attn": False,
    "trust_remote_code": False,
    "bf16": False,
    "adam_betas": (0.9, 0.95),
    "lr_warmup_ratio": 0.03,
    "lr_scheduler": "cosine_with_min_lr",
    "l2": 0.0,
    "data_format": "auto",
    "dataset_class": None,
    "input_key": None,
    "input_template": None,
    "apply_chat_template": False,
    "chat_template_kwargs": None,
    "max_samples": None,
    "zero_stage": 2,
    "gradient_checkpointing": False,
    "adam_offload": False,
    "zpg": 1,
    "compile": False,
    "overlap_comm": False,
    "seed": 42,
    "use_tensorboard": None,
    "use_wandb": None,
    "wandb_project": "openppo",
    "wandb_run_name": None,
    "wandb_group": None,
    "wandb_org": None,
    "wandb_mode": None,
    "log_samples_every": 10,
    "self_check": True,
    "profile_steps": None,
    "stop_when": (),
    "dry_run": False,
    "dry_run_ranks": None,
    "dry_run_memory": None,
}
DEFAULTS: dict[type, dict[str, Any]] = {
    TrainPPOConfig: {
        **COMMON,
        "save_value_network": False,
        # PPO
        "num_episodes": 1,
        "micro_rollout_tokens": None,
        "micro_train_tokens": None,
        "max_num_seqs": None,
        "cuda_graphs": False,
        "engine_check": "on",
        "offload_idle": False,
        "old_log_probs": "auto",
        "rollout_batch_size": 512,
        "micro_rollout_batch_size": 8,
        "dynamic_sampling": False,
        "dynamic_sampling_max_batches": 10,
        "freezing_actor_steps": -1,
        "value_pretrain_steps": 0,
        "enable_ema": False,
        "ema_beta": 0.992,
        "policy_loss_type": "ppo",
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "dual_clip": None,
        "cispo_eps_max": 5.0,
        "loss_agg": None,
        "entropy_coef": 0.0,
        "rollout_correction": "none",
        "rollout_correction_low": None,
        "rollout_correction_high": None,
        "value_clip": 0.2,
        "init_kl_coef": 0.01,
        "kl_target": None,
        "kl_horizon": 10000,
        "kl_estimator": "k1",
        "use_kl_loss": False,
        "advantage_estimator": "gae",
        "gamma": 1.0,
        "lambd": 0.95,
        "lambd_critic": None,
        "adaptive_lambd_alpha": None,
        "normalize_advantages": "default",
        "ptx_coef": 0.05,
        # rewards
        "normalize_reward": False,
        "reward_normalizer": "model",
        "missing_eos_penalty": None,
        "overlong_filter": False,
        "overlong_buffer_len": None,
        "overlong_penalty_factor": 1.0,
        "reward_clip_range": (-10.0, 10.0),
        "remote_rm_url": None,
        "verifiable_reward": (),
        "prm_pretrain": None,
        "reward_weights": (),
        "reward_error_value": None,
        "remote_rm_timeout": 180.0,
        "remote_rm_retries": 7,
        "remote_rm_batch_size": 64,
        "remote_rm_token_file": None,
        "verify_regex": None,
        "verify_length": None,
        "step_separator": "\n\n",
        "prm_placeholder_token": "ки",
        "prm_reward_tokens": ("+", "-"),
        "prm_apply_chat_template": False,
        "prm_aggregate": "steps",
        "critic_lora_rank": None,
        # evaluation
        "eval_data": None,
        "eval_before_training": False,
        "eval_n_samples_per_prompt": 1,
        "eval_temperature": 0.0,
        "pass_reward": None,
        "buffer_limit": 0,
        "buffer_cpu_offload": True,
        # models
        "reward_pretrain": None,
        "critic_pretrain": None,
        "ref_pretrain": None,
        "reward_fn": "f.py",
        "value_head_prefix": "score",
        # optimizer
        "actor_learning_rate": 1e-6,
        "critic_learning_rate": 9e-6,
        # data
        "prompt_data": "d",
        "prompt_data_probs": None,
        "prompt_split": "train",
        "pretrain_data_probs": None,
        "pretrain_data": None,
        "pretrain_split": "train",
        "pretrain_key": None,
        "label_key": None,
        "prompt_max_len": 1024,
        "n_samples_per_prompt": 1,
        # generation
        "generate_max_len": 1024,
        "temperature": 1.0,
        "rollout_engine": "hf",
        "vllm_gpu_memory_utilization": 0.3,
        "top_p": 1.0,
        "top_k": None,
    },
    TrainSFTConfig: {
        **COMMON,
        "dataset": "d",
        "dataset_probs": None,
        "dataset_split": "train",
        "eval_dataset": None,
        "max_steps": -1,
        "learning_rate": 5e-6,
        "max_len": 512,
        "output_key": "output",
    },
}
DEFAULTS[TrainRMConfig] = {
    **{name: value for name, value in DEFAULTS[TrainSFTConfig].items() if name not in ("input_key", "output_key")},
    "prompt_key": None,
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "margin_key": None,
    "loss": "sigmoid",
    "value_head_prefix": "score",
}
DEFAULTS[TrainPRMConfig] = {
    **{name: value for name, value in DEFAULTS[TrainSFTConfig].items() if name != "output_key"},
    "label_key": None,
    "placeholder_token": "ки",
    "reward_tokens": ("+", "-"),
}


def config_of(command: type, **changes: Any) -> Any:
    """A valid config of a command with some options changed, each in the group that has it."""
    if command is TrainPPOConfig:
        source = RewardConfig(reward_fn="f.py")
        config: Any = TrainPPOConfig(model=PPOModelConfig("m"), data=PPODataConfig("d"), rewards=source)
    else:
        config = command(supervised=SupervisedConfig("m", "d"))
    for group_name, group in vars(config).items():
        mine = {name: changes.pop(name) for name in list(changes) if name in vars(group)}
        config = dataclasses.replace(config, **{group_name: dataclasses.replace(group, **mine)})
    assert not changes, f"no such options: {changes}"
    return config


@pytest.mark.parametrize("command", DEFAULTS, ids=lambda command: command.__name__)
def test_defaults_are_the_published_ones(command: type) -> None:
    assert flat_dict(config_of(command)) == DEFAULTS[command]


@pytest.mark.parametrize("command", DEFAULTS, ids=lambda command: command.__name__)
def test_defaults_are_valid_on_one_to_eight_ranks(command: type) -> None:
    for world_size in (1, 2, 4, 8):
        config_of(command).validate(world_size)


@pytest.mark.parametrize("command", DEFAULTS, ids=lambda command: command.__name__)
def test_a_config_is_frozen(command: type) -> None:
    config = config_of(command)
    for group in vars(config).values():
        for field in dataclasses.fields(group):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(group, field.name, None)


def test_every_option_is_explained_in_sentences() -> None:
    files = Path(openppo.config.__file__).parent.glob("*.py")
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    groups = [
        node for node in classes if re.search(r"Config$", node.name) and "Options of" not in ast.unparse(node.body[0])
    ]
    assert len(groups) > 20
    for group in groups:
        for field, text in itertools.pairwise(group.body):
            if isinstance(field, ast.AnnAssign):
                name = f"{group.name}.{ast.unparse(field.target)}"
                assert isinstance(text, ast.Expr), name
                explained = ast.literal_eval(text.value)
                assert re.fullmatch(r"[A-Z].*\.", explained, re.DOTALL), f"{name}: {explained}"


PPO, SFT, RM, PRM = TrainPPOConfig, TrainSFTConfig, TrainRMConfig, TrainPRMConfig
NO_REWARD = (
    "No reward is given: pass --reward_pretrain MODEL, --reward_fn FILE.py[:name], --remote_rm_url URL, "
    "--verifiable_reward NAME or --prm_pretrain MODEL."
)
BAD: list[tuple[type, dict[str, Any], int, str]] = [
    # options of all commands
    (SFT, {"logging_steps": 0}, 1, "--logging_steps must be at least 1, got 0"),
    (SFT, {"max_skipped_steps": 0}, 1, "--max_skipped_steps must be at least 1, got 0"),
    (SFT, {"save_steps": -2}, 1, "--save_steps must be -1, 0 or more, got -2"),
    (SFT, {"max_ckpt_num": 0}, 1, "--max_ckpt_num must be at least 1, got 0"),
    (
        SFT,
        {"keep_best": "eval_loss"},
        1,
        "--keep_best eval_loss compares .* --eval_dataset",
    ),
    (
        PPO,
        {"keep_best": "eval_reward"},
        1,
        "--keep_best eval_reward compares .* --eval_data",
    ),
    (
        PPO,
        {"keep_best": "eval_pass@1", "eval_data": "e", "reward_pretrain": "r"},
        1,
        "--keep_best eval_pass@1: which reward of a reward model or server passes.*--pass_reward",
    ),
    (PPO, {"keep_best": "reward"}, 1, "--keep_best reward is no metric of evaluation"),
    (PPO, {"dry_run": True, "dry_run_ranks": 0}, 1, "--dry_run_ranks must be at least 1, got 0"),
    (SFT, {"dry_run": True, "dry_run_memory": 0.0}, 1, "--dry_run_memory must be positive, got 0.0"),
    (PPO, {"dry_run_ranks": 8}, 1, "--dry_run_ranks has an effect with --dry_run only: add it"),
    (RM, {"dry_run_memory": 80.0}, 1, "--dry_run_memory has an effect with --dry_run only: add it"),
    (PPO, {"dry_run": True, "dry_run_ranks": 3}, 1, "--train_batch_size 128 .* among 3 ranks: use a multiple of 3"),
    (SFT, {"heartbeat_timeout": 4.0}, 1, "--heartbeat_timeout must lie between 5 and 3600 seconds, got 4"),
    (PPO, {"heartbeat_timeout": math.nan}, 1, "--heartbeat_timeout must lie between 5 and 3600 seconds, got nan"),
    (PPO, {"stall_timeout": -1.0}, 1, "--stall_timeout must not be negative, got -1.0; 0 waits for ever"),
    (RM, {"zero_stage": 4}, 1, "--zero_stage must be 0, 1, 2 or 3, got 4"),
    (PPO, {"seed": -1}, 1, "--seed must not be negative, got -1"),
    (PPO, {"max_norm": -1.0}, 1, "--max_norm must not be negative, got -1.0; 0 switches clipping off"),
    (PPO, {"max_norm": math.nan}, 1, "--max_norm must not be negative, got nan"),
    (SFT, {"adam_offload": True, "zero_stage": 0}, 1, "--adam_offload needs .* use --zero_stage 1, 2 or 3"),
    (PPO, {"adam_betas": (0.9, 1.0)}, 1, r"--adam_betas must lie in \[0, 1\), got 0.9 1.0"),
    (PPO, {"adam_betas": (-0.1, 0.9)}, 1, r"--adam_betas must lie in \[0, 1\)"),
    (PPO, {"lr_warmup_ratio": 1.1}, 1, r"--lr_warmup_ratio must lie in \[0, 1\], got 1.1"),
    (PPO, {"lr_warmup_ratio": -0.1}, 1, r"--lr_warmup_ratio must lie in \[0, 1\]"),
    (PPO, {"l2": -0.1}, 1, "--l2 must not be negative, got -0.1"),
    (SFT, {"train_batch_size": 0}, 1, "--train_batch_size must be at least 1, got 0"),
    (RM, {"micro_train_batch_size": 0}, 1, "--micro_train_batch_size must be at least 1"),
    (PPO, {"max_epochs": 0}, 1, "--max_epochs must be at least 1"),
    (PPO, {"train_batch_size": 128}, 3, "--train_batch_size 128 .* among 3 ranks: use a multiple of 3"),
    (SFT, {"train_batch_size": 5}, 2, "--train_batch_size 5 .* among 2 ranks: use a multiple of 2"),
    (RM, {"train_batch_size": 5}, 2, "--train_batch_size 5 .* among 2 ranks: use a multiple of 2"),
    # PPO
    (PPO, {"num_episodes": 0}, 1, "--num_episodes must be at least 1, got 0"),
    (PPO, {"rollout_batch_size": 0}, 1, "--rollout_batch_size must be at least 1"),
    (PPO, {"micro_rollout_batch_size": 0}, 1, "--micro_rollout_batch_size must be at least 1"),
    (PPO, {"n_samples_per_prompt": 0}, 1, "--n_samples_per_prompt must be at least 1"),
    (PPO, {"init_kl_coef": -0.01}, 1, "--init_kl_coef must be at least 0, got -0.01"),
    (PPO, {"ptx_coef": -1.0}, 1, "--ptx_coef must be at least 0"),
    (PPO, {"buffer_limit": -1}, 1, "--buffer_limit must be at least 0"),
    (PPO, {"eps_clip": 0.0}, 1, "--eps_clip must be positive, got 0.0"),
    (PPO, {"eps_clip": math.nan}, 1, "--eps_clip must be positive, got nan"),
    (PPO, {"value_clip": 0.0}, 1, "--value_clip must be positive, got 0.0; None switches it off"),
    (PPO, {"gamma": 1.1}, 1, r"--gamma must lie in \[0, 1\], got 1.1"),
    (PPO, {"gamma": math.nan}, 1, r"--gamma must lie in \[0, 1\], got nan"),
    (PPO, {"lambd": -0.1}, 1, r"--lambd must lie in \[0, 1\], got -0.1"),
    (PPO, {"save_path": ""}, 1, "--save_path must not be empty: name the folder"),
    (SFT, {"save_path": ""}, 1, "--save_path must not be empty: name the folder"),
    (PPO, {"save_path": "~/run"}, 1, '--save_path ~/run: "~" is not expanded here'),
    (PPO, {"ckpt_path": "~/run"}, 1, '--ckpt_path ~/run: "~" is not expanded here'),
    (PPO, {"reward_normalizer": "running"}, 1, "--reward_normalizer running has no effect without --normalize_reward"),
    (PPO, {"reward_clip_range": (1.0, 1.0)}, 1, "--reward_clip_range needs two rising numbers, got 1.0 1.0"),
    (PPO, {"reward_clip_range": (5.0, -5.0)}, 1, "--reward_clip_range needs two rising numbers, got 5.0 -5.0"),
    (PPO, {"reward_fn": None}, 1, re.escape(NO_REWARD)),
    (PPO, {"actor_learning_rate": -1.0}, 1, "--actor_learning_rate must not be negative, got -1.0"),
    (PPO, {"critic_learning_rate": -1.0}, 1, "--critic_learning_rate must not be negative, got -1.0"),
    (PPO, {"input_template": "Q:"}, 1, "--input_template must contain {} once, where the prompt goes; got 'Q:'"),
    (PPO, {"input_template": "{} {}"}, 1, "--input_template must contain {} once"),
    (PPO, {"chat_template_kwargs": "{}"}, 1, "--chat_template_kwargs has no effect without --apply_chat_template: add"),
    (
        SFT,
        {"apply_chat_template": True, "chat_template_kwargs": "a=1"},
        1,
        "--chat_template_kwargs a=1: not a JSON obj",
    ),
    (RM, {"apply_chat_template": True, "chat_template_kwargs": "[1]"}, 1, r"--chat_template_kwargs \[1\]: not a JSON"),
    (PPO, {"max_samples": 0}, 1, "--max_samples must be at least 1, got 0"),
    (PPO, {"prompt_max_len": 0}, 1, "--prompt_max_len must be at least 1, got 0"),
    (PPO, {"generate_max_len": 0}, 1, "--generate_max_len must be at least 1, got 0"),
    (PPO, {"temperature": 0.0}, 1, "--temperature must be positive, got 0.0"),
    (PPO, {"top_p": 0.0}, 1, r"--top_p must lie in \(0, 1\], got 0.0"),
    (PPO, {"top_p": 1.1}, 1, r"--top_p must lie in \(0, 1\], got 1.1"),
    (PPO, {"top_k": 0}, 1, "--top_k must be at least 1, got 0"),
    (
        PPO,
        {"rollout_batch_size": 6, "train_batch_size": 4, "n_samples_per_prompt": 2},
        4,
        "--rollout_batch_size 6 does not divide among 4 ranks: use a multiple of 4",
    ),
    (
        PPO,
        {"rollout_batch_size": 6, "train_batch_size": 4, "n_samples_per_prompt": 3},
        2,
        "--rollout_batch_size 6 x --n_samples_per_prompt 3 = 18 samples .* --train_batch_size 4: make "
        "--train_batch_size a divisor of that number",
    ),
    (
        PPO,
        {"rollout_batch_size": 64, "train_batch_size": 128},
        1,
        "--rollout_batch_size 64 x --n_samples_per_prompt 1 = 64 samples do not divide",
    ),
    (
        PPO,
        {"buffer_limit": 63},
        2,
        "--buffer_limit 63 on 2 ranks holds fewer samples than --train_batch_size 128: raise it, or use 0 for no limit",
    ),
    (PPO, {"dynamic_sampling_max_batches": 0}, 1, "--dynamic_sampling_max_batches must be at least 1, got 0"),
    (PPO, {"freezing_actor_steps": -2}, 1, "--freezing_actor_steps must be at least -1"),
    (PPO, {"value_pretrain_steps": -1}, 1, "--value_pretrain_steps must be at least 0"),
    (PPO, {"ema_beta": 1.0}, 1, r"--ema_beta must lie in \[0, 1\), got 1.0"),
    (PPO, {"dynamic_sampling": True}, 1, "--dynamic_sampling .* use --n_samples_per_prompt of at least 2"),
    (PPO, {"lambd_critic": 1.5}, 1, r"--lambd_critic must lie in \[0, 1\], got 1.5"),
    (PPO, {"adaptive_lambd_alpha": 0.0}, 1, "--adaptive_lambd_alpha must be positive, got 0.0"),
    (PPO, {"kl_horizon": 0}, 1, "--kl_horizon must be at least 1"),
    (PPO, {"kl_target": 1.0, "kl_horizon": 102}, 1, "--kl_horizon 102 is too short for the 512 samples of a step"),
    (PPO, {"kl_target": 0.0}, 1, "--kl_target must be positive, got 0.0"),
    (PPO, {"kl_target": 6.0, "init_kl_coef": 0.0}, 1, "--kl_target .* --init_kl_coef 0 .*: start from a positive one"),
    (PPO, {"use_kl_loss": True, "init_kl_coef": 0.0, "kl_estimator": "k3"}, 1, "give a positive --init_kl_coef"),
    (PPO, {"use_kl_loss": True}, 1, "--use_kl_loss with --kl_estimator k1 .* Use --kl_estimator k2 or k3"),
    (PPO, {"eps_clip_high": 0.0}, 1, "--eps_clip_high must be positive, got 0.0"),
    (PPO, {"dual_clip": 1.0}, 1, "--dual_clip must be above 1, got 1.0"),
    (PPO, {"dual_clip": 3.0, "policy_loss_type": "cispo"}, 1, "leave --dual_clip out"),
    (PPO, {"cispo_eps_max": 0.0}, 1, "--cispo_eps_max must be positive"),
    (PPO, {"entropy_coef": -0.1}, 1, "--entropy_coef must not be negative, got -0.1"),
    (PPO, {"rollout_correction_high": 2.0}, 1, "--rollout_correction_high has no effect without --rollout_correction"),
    (PPO, {"rollout_correction_low": 0.5, "rollout_correction": "tis"}, 1, "tis: use mis or icepop"),
    (
        PPO,
        {"rollout_correction_low": 2.0, "rollout_correction_high": 1.0, "rollout_correction": "mis"},
        1,
        "--rollout_correction_low 2.0 must be below --rollout_correction_high 1.0",
    ),
    (PPO, {"missing_eos_penalty": -1.0}, 1, "--missing_eos_penalty must not be negative, got -1.0: it is subtracted"),
    (PPO, {"overlong_buffer_len": 0}, 1, "--overlong_buffer_len must be at least 1"),
    (PPO, {"overlong_buffer_len": 2000}, 1, "--overlong_buffer_len 2000 is longer than --generate_max_len 1024"),
    (PPO, {"overlong_penalty_factor": -1.0}, 1, "--overlong_penalty_factor must not be negative"),
    (PPO, {"normalize_reward": True}, 1, "no --reward_pretrain: use --reward_normalizer running"),
    (PPO, {"reward_weights": ("a",)}, 1, "--reward_weights takes NAME=NUMBER ..., got 'a'"),
    (PPO, {"reward_weights": ("a=b",)}, 1, "--reward_weights takes NAME=NUMBER ..., got 'a=b'"),
    (PPO, {"reward_weights": ("a=1", "a=2")}, 1, "--reward_weights names 'a' twice"),
    (
        PPO,
        {"reward_fn": None, "reward_pretrain": "r", "prm_pretrain": "p", "reward_weights": ("prm=1", "reward=2")},
        1,
        "--reward_weights names reward, but the rewards are reward_model, prm. Use their names.",
    ),
    (
        PPO,
        {"reward_fn": None, "remote_rm_url": "http://h", "reward_weights": ("remote=2",)},
        1,
        "--reward_weights names remote, but the rewards are reward. Use their names.",
    ),
    (PPO, {"remote_rm_timeout": 0.0}, 1, "--remote_rm_timeout must be positive"),
    (PPO, {"remote_rm_retries": -1}, 1, "--remote_rm_retries must be at least 0"),
    (PPO, {"remote_rm_batch_size": 0}, 1, "--remote_rm_batch_size must be at least 1"),
    (PPO, {"verifiable_reward": ("regex",)}, 1, "--verifiable_reward regex needs --verify_regex"),
    (PPO, {"verify_length": 5}, 1, "--verify_length has no effect without --verifiable_reward length"),
    (PPO, {"verifiable_reward": ("math",), "input_key": "q"}, 1, "math compares with a label: .* --label_key"),
    (PPO, {"prm_reward_tokens": ("+",)}, 1, "--prm_reward_tokens needs two different tokens, good and bad; got [+]"),
    (PPO, {"prm_reward_tokens": ("+", "+")}, 1, "--prm_reward_tokens needs two different tokens.* got [+] [+]"),
    (PPO, {"step_separator": ""}, 1, "--step_separator must not be empty"),
    (PPO, {"critic_lora_rank": -1}, 1, "--critic_lora_rank must not be negative"),
    (PPO, {"prompt_data": "a,,b"}, 1, "--prompt_data 'a,,b' has an empty name between commas"),
    (PPO, {"prompt_data": "a,b", "prompt_data_probs": "0.5"}, 1, "one positive number for each of the 2 sources"),
    (PPO, {"prompt_data": "a,b", "prompt_data_probs": "0.5,x"}, 1, "--prompt_data_probs '0.5,x': give one positive"),
    (PPO, {"pretrain_data": "a", "pretrain_data_probs": "0"}, 1, "--pretrain_data_probs '0': give one positive"),
    (PPO, {"eval_steps": 0}, 1, "--eval_steps must be -1 or at least 1, got 0"),
    (PPO, {"eval_n_samples_per_prompt": 4}, 1, "--eval_n_samples_per_prompt 4 .*: raise --eval_temperature"),
    (PPO, {"eval_temperature": -1.0}, 1, "--eval_temperature must not be negative"),
    (PPO, {"eval_before_training": True}, 1, "--eval_before_training needs --eval_data"),
    (PPO, {"zpg": 2}, 2, "--zpg 2 partitions weights, .* use --zero_stage 3"),
    *(
        (
            SFT,
            {"stop_when": ("loss < 1", text)},
            1,
            f"--stop_when '{re.escape(text)}': write a metric, one of > >= < <=",
        )
        for text in ("kl", "kl >", "> 0.2", "kl > a", "kl = 1", "kl == 1", "kl > nan", "kl > inf", "1 < kl < 2", "")
    ),
    (PPO, {"ref_pretrain": "r", "init_kl_coef": 0.0}, 1, "--ref_pretrain: --init_kl_coef 0 wants no reference model"),
    (PPO, {"stop_when": ("eval_reward>1",)}, 1, "--stop_when 'eval_reward>1' looks at evaluations: .*--eval_data"),
    (RM, {"stop_when": ("eval/a b/loss < 1",)}, 1, "--stop_when .* looks at evaluations: .*--eval_dataset"),
    # LoRA
    (SFT, {"lora_rank": -1}, 1, "--lora_rank must not be negative, got -1; 0 switches LoRA off"),
    (RM, {"lora_alpha": 0}, 1, "--lora_alpha must be at least 1"),
    (PRM, {"lora_dropout": 1.0}, 1, r"--lora_dropout must lie in \[0, 1\), got 1.0"),
    (PPO, {"target_modules": ()}, 1, "--target_modules needs at least one name, or 'all-linear'"),
    (SFT, {"load_in_4bit": True}, 1, "--load_in_4bit .* give --lora_rank"),
    (PPO, {"load_in_4bit": True, "lora_rank": 4, "zero_stage": 3}, 1, "--load_in_4bit: .* --zero_stage 0, 1 or 2"),
    # SFT, RM and PRM
    (
        SFT,
        {"dataset": "a,b", "dataset_probs": "1"},
        1,
        "--dataset_probs '1': give one positive number for each of the 2",
    ),
    (PRM, {"placeholder_token": ""}, 1, "--placeholder_token must not be empty"),
    (PRM, {"reward_tokens": ("+", "+")}, 1, "--reward_tokens needs at least two different tokens, got [+] [+]"),
    (SFT, {"input_template": "{}{}"}, 1, "--input_template must contain {} once"),
    (RM, {"max_samples": 0}, 1, "--max_samples must be at least 1"),
    (SFT, {"max_len": 1}, 1, "--max_len must be at least 2, got 1"),
    (RM, {"learning_rate": -1.0}, 1, "--learning_rate must not be negative, got -1.0"),
    (SFT, {"eval_steps": 0}, 1, "--eval_steps must be -1 or at least 1, got 0"),
    (SFT, {"eval_steps": -2}, 1, "--eval_steps must be -1 or at least 1, got -2"),
    (RM, {"max_steps": 0}, 1, "--max_steps must be -1 or at least 1, got 0"),
    (RM, {"margin_key": "m", "loss": "logexp"}, 1, "--margin_key works with --loss sigmoid only"),
]


@pytest.mark.parametrize(("command", "changes", "world_size", "message"), BAD, ids=lambda value: str(value)[:60])
def test_an_option_that_cannot_work_is_an_error_naming_the_flag_and_the_remedy(
    command: type, changes: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(command, **changes).validate(world_size)


def with_each_float(command: type, number: float) -> Iterator[tuple[str, Any]]:
    """For each option of numbers, and each number of a pair: its name, and a config where it is ``number``."""
    options = [option for group in get_type_hints(command).values() for option in dataclasses.fields(group)]
    missing = {option.name: "x" for option in options if option.default is dataclasses.MISSING}
    missing |= {"reward_fn": "f.py"} if any(option.name == "reward_fn" for option in options) else {}
    for option in options:
        if "float" in str(option.type):
            pair = option.default if isinstance(option.default, tuple) else ()
            values = [(*pair[:at], number, *pair[at + 1 :]) for at in range(len(pair))] or [number]
            yield from ((option.name, from_options(command, **missing, **{option.name: value})) for value in values)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "command",
    [*DEFAULTS, EvaluateConfig, GenerateConfig, MergeLoRAConfig, ReportConfig, ServeRMConfig],
    ids=lambda command: command.__name__,
)
def test_no_number_may_be_nan_or_infinite(command: type, number: float) -> None:
    accepted = []
    for name, config in with_each_float(command, number):
        try:
            config.validate(1)
        except ValueError as error:
            assert str(error).startswith(f"--{name} ")
        else:
            accepted.append(name)
    assert accepted == ["reward_clip_range"] * (command is PPO and math.isinf(number))  # at one of its ends


def test_scores_may_be_clipped_on_one_side_only() -> None:
    config_of(PPO, reward_clip_range=(-math.inf, 5.0)).validate(1)
    config_of(PPO, reward_clip_range=(-5.0, math.inf)).validate(1)


@pytest.mark.parametrize("share", ["nan", "inf"])
def test_a_share_of_mixed_sources_is_a_finite_number(share: str) -> None:
    with pytest.raises(ValueError, match="--prompt_data_probs .* give one positive number"):
        parse_probs("a,b", f"1,{share}", "prompt_data")


@pytest.mark.parametrize(
    ("command", "changes", "world_size"),
    [
        (PPO, {"value_clip": None}, 1),
        (PPO, {"gamma": 0.0, "lambd": 0.0}, 1),
        (PPO, {"init_kl_coef": 0.0, "ptx_coef": 0.0, "max_norm": 0.0, "l2": 0.0, "seed": 0}, 1),
        (PPO, {"actor_learning_rate": 0.0, "critic_learning_rate": 0.0}, 1),
        (PPO, {"top_p": 1e-9, "top_k": 1, "max_samples": 1}, 1),
        (PPO, {"adam_betas": (0.0, 0.0), "lr_warmup_ratio": 1.0}, 1),
        (PPO, {"buffer_limit": 64}, 2),
        (PPO, {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "train_batch_size": 12}, 3),
        (PPO, {"reward_fn": None, "reward_pretrain": "r", "normalize_reward": True}, 1),
        (PPO, {"reward_pretrain": "r", "verifiable_reward": ("length",), "verify_length": 5}, 1),
        (PPO, {"normalize_reward": True, "reward_normalizer": "running"}, 1),
        (PPO, {"kl_target": 6.0, "use_kl_loss": True, "kl_estimator": "k3"}, 1),
        (PPO, {"dynamic_sampling": True, "n_samples_per_prompt": 2, "freezing_actor_steps": 0}, 1),
        (PPO, {"reward_weights": ("a=1", "b=-0.5")}, 1),
        (PPO, {"reward_fn": None, "remote_rm_url": "f.py:g", "reward_weights": ("a=1",)}, 1),  # it may return a dict
        (PPO, {"reward_fn": None, "reward_pretrain": "r", "reward_weights": ("reward=1",)}, 1),
        (PPO, {"load_in_4bit": True, "lora_rank": 4, "critic_lora_rank": 0}, 1),
        (PPO, {"input_template": "{}"}, 1),
        (SFT, {"adam_offload": True, "zero_stage": 1}, 1),
        (SFT, {"eval_steps": 1, "max_steps": 1, "max_len": 2}, 1),
        (RM, {"margin_key": "m", "loss": "sigmoid"}, 1),
        (RM, {"loss": "logexp"}, 1),
    ],
    ids=str,
)
def test_options_at_the_edge_of_what_works_are_accepted(
    command: type, changes: dict[str, Any], world_size: int
) -> None:
    config_of(command, **changes).validate(world_size)


def test_the_flat_form_keeps_the_order_of_the_groups() -> None:
    names = list(flat_dict(config_of(PPO)))
    assert names[0] == "pretrain"
    assert names[-1] == "keep_best"
    assert len(names) == len(set(names))


def test_reward_weights_are_numbers_by_name() -> None:
    assert RewardConfig(reward_weights=("right=1", "a=b=-.5")).weights() == {"right": 1.0, "a=b": -0.5}


def test_shares_of_mixed_sources_sum_to_one() -> None:
    assert parse_probs("a, b", "3,1", "prompt_data") == [("a", 0.75), ("b", 0.25)]
    assert parse_probs("a,b", None, "prompt_data") == [("a", None), ("b", None)]


@pytest.mark.parametrize("command", DEFAULTS, ids=lambda command: command.__name__)
def test_a_config_is_its_options_by_name(command: type) -> None:
    options = flat_dict(config_of(command)) | {"max_samples": 7, "lora_alpha": 3, "seed": 5}
    made = from_options(command, **options)
    assert flat_dict(made) == options
    assert (made.lora.lora_alpha, made.deepspeed.seed) == (3, 5)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:password@host:5000/get_reward", "http://***@host:5000/get_reward"),
        ("https://token@host,http://a:b@c:d@host/x", "https://***@host,http://***@host/x"),
        ("http://host/get_reward?key=secret&b=1,http://other/", "http://host/get_reward?***,http://other/"),
        ("http://host/@x", "http://host/@x"),
        ("me@example.com /data/a@b.jsonl", "me@example.com /data/a@b.jsonl"),
    ],
)
def test_secrets_in_urls_are_masked_where_options_are_written(text: str, masked: str) -> None:
    assert mask_credentials(text) == masked
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", remote_rm_url=text)
    assert flat_dict(config)["remote_rm_url"] == masked
    assert config.rewards.remote_rm_url == text


def test_an_option_that_the_command_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="TrainSFTConfig has no option eps_clip; see --help"):
        from_options(TrainSFTConfig, pretrain="m", dataset="d", eps_clip=0.1)
    with pytest.raises(TypeError, match="prompt_data"):
        from_options(TrainPPOConfig, pretrain="m")


def test_a_key_of_wandb_is_in_no_file_and_the_file_reads_back() -> None:
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="p", use_wandb="5ecre7")
    assert config.tracking.use_wandb == "5ecre7"
    assert flat_dict(config)["use_wandb"] == "True"
    assert flat_dict(from_options(TrainPPOConfig, pretrain="m", prompt_data="p"))["use_wandb"] is None


@pytest.mark.parametrize(
    ("given", "steps"), [("3", {3}), ("2-4,7", {2, 3, 4, 7}), (" 1 , 1-2 ", {1, 2}), (None, set())]
)
def test_profiled_steps_are_those_that_are_named(given: str | None, steps: set[int]) -> None:
    options = TrackingConfig(profile_steps=given)
    options.validate()
    assert {step for step in range(12) if options.is_profiled(step)} == steps


@pytest.mark.parametrize("given", ["", "a", "3-", "0", "4-2", "1,,2", "-1", "1:3"])
def test_profiled_steps_that_make_no_sense_name_the_flag(given: str) -> None:
    with pytest.raises(ValueError, match="^--profile_steps"):
        TrackingConfig(profile_steps=given).validate()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("actor_learning_rate", "1e-6", "must be float, not str"),
        ("rollout_batch_size", 64.0, "must be int, not float"),
        ("bf16", "false", "must be bool, not str"),
        ("zero_stage", True, "must be Literal[0, 1, 2, 3], not bool"),
        ("train_batch_size", True, "must be int, not bool"),
        ("max_samples", "7", "must be int | None, not str"),
        ("target_modules", 3, "must be tuple[str, ...], not int"),
        ("zero_stage", 7, "must be Literal[0, 1, 2, 3], not int"),
        ("adam_betas", [0.9], "must be tuple[float, float], not tuple"),
        ("verifiable_reward", ["maths"], "must be tuple[Literal['exact_match', 'regex'"),
    ],
)
def test_an_option_of_another_type_is_an_error_that_names_it(option: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}=") as error:
        from_options(TrainPPOConfig, pretrain="m", prompt_data="d", **{option: value})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "made"),
    [
        ("actor_learning_rate", 1, 1),
        ("save_path", Path("a/b"), "a/b"),
        ("target_modules", ["q_proj", "v_proj"], ("q_proj", "v_proj")),
        ("target_modules", "all-linear", ("all-linear",)),
        ("adam_betas", [0.9, 0.95], (0.9, 0.95)),
        ("max_samples", None, None),
    ],
)
def test_what_stands_for_a_value_of_an_option_becomes_it(option: str, value: object, made: object) -> None:
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", **{option: value})
    assert flat_dict(config)[option] == made


@pytest.mark.parametrize(
    ("options", "at_once", "later"),
    [
        ({}, "rollout", "rollout"),
        ({"bf16": True}, "training", "recompute"),
        ({"bf16": True, "max_epochs": 2}, "recompute", "recompute"),
        ({"bf16": True, "train_batch_size": 4}, "recompute", "recompute"),
        ({"bf16": True, "lora_rank": 4}, "training", "recompute"),
        ({"bf16": True, "lora_rank": 4, "lora_dropout": 0.1}, "recompute", "recompute"),
        ({"bf16": True, "old_log_probs": "recompute"}, "recompute", "recompute"),
        ({"bf16": True, "old_log_probs": "rollout"}, "rollout", "rollout"),
        *(({"bf16": True, **cut}, "recompute", "recompute") for cut in ({"top_p": 0.9}, {"top_k": 5})),
        ({"bf16": True, "rollout_correction": "tis"}, "recompute", "recompute"),
        ({"rollout_correction": "tis"}, "recompute", "recompute"),
    ],
)
def test_old_log_probs_come_from_where_they_are_the_policys(options: dict[str, Any], at_once: str, later: str) -> None:
    """``at_once``: one optimizer step trains on all samples of a rollout."""
    sizes = {"rollout_batch_size": 8, "train_batch_size": 8}
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py", **(sizes | options))
    assert (config.old_log_probs_from(True), config.old_log_probs_from(False)) == (at_once, later)
