"""Command lines to configs: every option is a flag of its own name, whatever way it is given."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from openppo.cli.options import option_names, parse_options, run_command
from openppo.config import (
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    MergeLoRAConfig,
    ServeRMConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    flat_dict,
)
from openppo.tracking import save_config

Flag = tuple[str, str, list[str], Any]
"""Group in the config, flag, its arguments, and the value that they mean; none of them a default."""

RUN: list[Flag] = [
    ("run", "save_path", ["out dir"], "out dir"),
    ("run", "logging_steps", ["5"], 5),
    ("tracking", "use_tensorboard", ["tb"], "tb"),
    ("tracking", "use_wandb", ["True"], "True"),
    ("tracking", "wandb_project", ["p"], "p"),
    ("tracking", "wandb_run_name", ["r"], "r"),
    ("tracking", "wandb_group", ["g"], "g"),
    ("tracking", "wandb_org", ["us"], "us"),
    ("tracking", "wandb_mode", ["offline"], "offline"),
    ("tracking", "log_samples_every", ["3"], 3),
    ("tracking", "no_self_check", [], False),
    ("tracking", "profile_steps", ["3,5-7"], "3,5-7"),
    ("run", "max_skipped_steps", ["3"], 3),
    ("checkpoint", "ckpt_path", ["out dir"], "out dir"),
    ("checkpoint", "save_steps", ["0"], 0),
    ("checkpoint", "max_ckpt_num", ["5"], 5),
    ("checkpoint", "load_checkpoint", [], True),
    ("checkpoint", "save_hf_ckpt", [], True),
    ("checkpoint", "keep_best", ["eval_reward"], "eval_reward"),
    ("run", "stop_when", ["kl > 0.2", "eval_loss<1e-3"], ("kl > 0.2", "eval_loss<1e-3")),
    ("run", "dry_run", [], True),
    ("run", "dry_run_ranks", ["8"], 8),
    ("run", "dry_run_memory", ["80"], 80.0),
    ("run", "heartbeat_timeout", ["30"], 30.0),
    ("run", "stall_timeout", ["600"], 600.0),
]
DEEPSPEED: list[Flag] = [
    ("deepspeed", "zero_stage", ["3"], 3),
    ("deepspeed", "bf16", [], True),
    ("deepspeed", "gradient_checkpointing", [], True),
    ("deepspeed", "adam_offload", [], True),
    ("deepspeed", "max_norm", ["0.5"], 0.5),
    ("deepspeed", "seed", ["7"], 7),
    ("deepspeed", "zpg", ["2"], 2),
    ("deepspeed", "compile", [], True),
    ("deepspeed", "overlap_comm", [], True),
]
LORA: list[Flag] = [
    ("lora", "lora_rank", ["7"], 7),
    ("lora", "lora_alpha", ["7"], 7),
    ("lora", "lora_dropout", ["0.25"], 0.25),
    ("lora", "target_modules", ["q_proj", "v_proj"], ("q_proj", "v_proj")),
    ("lora", "load_in_4bit", [], True),
]
ADAM: list[Flag] = [
    ("adam", "adam_betas", ["0.8", "0.99"], (0.8, 0.99)),
    ("adam", "l2", ["1e-2"], 0.01),
    ("adam", "lr_scheduler", ["linear"], "linear"),
    ("adam", "lr_warmup_ratio", ["0.1"], 0.1),
]
BATCH: list[Flag] = [
    ("batch", "train_batch_size", ["16"], 16),
    ("batch", "micro_train_batch_size", ["2"], 2),
    ("batch", "max_epochs", ["3"], 3),
]
SUPERVISED: list[Flag] = [
    ("supervised", "pretrain", ["model"], "model"),
    ("supervised", "dataset", ["rows.jsonl"], "rows.jsonl"),
    ("supervised", "dataset_split", ["part"], "part"),
    ("supervised", "eval_dataset", ["held.jsonl"], "held.jsonl"),
    ("supervised", "eval_split", ["dev"], "dev"),
    ("supervised", "eval_steps", ["10"], 10),
    ("supervised", "max_steps", ["20"], 20),
    ("supervised", "learning_rate", ["3e-4"], 3e-4),
    ("supervised", "input_template", ["Q: {}\nA:"], "Q: {}\nA:"),
    ("supervised", "apply_chat_template", [], True),
    ("supervised", "chat_template_kwargs", ['{"a": 1}'], '{"a": 1}'),
    ("supervised", "max_samples", ["100"], 100),
    ("supervised", "max_len", ["256"], 256),
    ("supervised", "flash_attn", [], True),
    ("supervised", "trust_remote_code", [], True),
    ("supervised", "dataset_probs", ["some_dataset_probs"], "some_dataset_probs"),
    ("supervised", "data_format", ["hh"], "hh"),
    ("supervised", "dataset_class", ["f.py:Rows"], "f.py:Rows"),
]
PROMPTS: list[Flag] = [
    ("prompts", "pretrain", ["some_pretrain"], "some_pretrain"),
    ("prompts", "prompt_data", ["some_prompt_data"], "some_prompt_data"),
    ("prompts", "prompt_split", ["some_prompt_split"], "some_prompt_split"),
    ("prompts", "data_format", ["hh"], "hh"),
    ("prompts", "dataset_class", ["some_dataset_class"], "some_dataset_class"),
    ("prompts", "input_key", ["some_input_key"], "some_input_key"),
    ("prompts", "label_key", ["some_label_key"], "some_label_key"),
    ("prompts", "input_template", ["some_input_template"], "some_input_template"),
    ("prompts", "apply_chat_template", [], True),
    ("prompts", "chat_template_kwargs", ['{"a": 1}'], '{"a": 1}'),
    ("prompts", "engine_check", ["off"], "off"),
    ("prompts", "max_samples", ["7"], 7),
    ("prompts", "prompt_max_len", ["7"], 7),
    ("prompts", "generate_max_len", ["7"], 7),
    ("prompts", "n_samples_per_prompt", ["7"], 7),
    ("prompts", "temperature", ["0.25"], 0.25),
    ("prompts", "top_p", ["0.25"], 0.25),
    ("prompts", "top_k", ["7"], 7),
    ("prompts", "micro_batch_size", ["7"], 7),
    ("prompts", "bf16", [], True),
    ("prompts", "flash_attn", [], True),
    ("prompts", "trust_remote_code", [], True),
    ("prompts", "seed", ["7"], 7),
]
FLAGS: dict[type, list[Flag]] = {
    TrainPPOConfig: [
        *RUN,
        *DEEPSPEED,
        *LORA,
        *ADAM,
        *BATCH,
        ("learning_rate", "actor_learning_rate", ["2e-6"], 2e-6),
        ("learning_rate", "critic_learning_rate", ["0.001"], 0.001),
        ("ppo", "num_episodes", ["2"], 2),
        ("ppo", "rollout_batch_size", ["64"], 64),
        ("ppo", "micro_rollout_batch_size", ["3"], 3),
        ("ppo", "n_samples_per_prompt", ["4"], 4),
        ("loss", "eps_clip", ["0.3"], 0.3),
        ("loss", "value_clip", ["None"], None),
        ("kl", "init_kl_coef", ["0"], 0.0),
        ("kl", "kl_estimator", ["k3"], "k3"),
        ("shaping", "reward_clip_range", ["-1", "2.5"], (-1.0, 2.5)),
        ("advantage", "gamma", ["0.99"], 0.99),
        ("advantage", "lambd", ["1"], 1.0),
        ("ppo", "ptx_coef", ["0.1"], 0.1),
        ("ppo", "buffer_limit", ["512"], 512),
        ("ppo", "no_buffer_cpu_offload", [], False),
        ("model", "pretrain", ["actor"], "actor"),
        ("rewards", "reward_pretrain", ["reward"], "reward"),
        ("rewards", "reward_fn", ["f.py:name"], "f.py:name"),
        ("model", "critic_pretrain", ["critic"], "critic"),
        ("model", "ref_pretrain", ["reference"], "reference"),
        ("model", "value_head_prefix", ["v_head"], "v_head"),
        ("model", "flash_attn", [], True),
        ("model", "trust_remote_code", [], True),
        ("model", "save_value_network", [], True),
        ("data", "prompt_data", ["prompts.jsonl"], "prompts.jsonl"),
        ("data", "prompt_split", ["part"], "part"),
        ("data", "pretrain_data", ["texts.jsonl"], "texts.jsonl"),
        ("data", "pretrain_split", ["rest"], "rest"),
        ("data", "pretrain_key", ["text"], "text"),
        ("data", "input_key", ["question"], "question"),
        ("data", "label_key", ["answer"], "answer"),
        ("data", "input_template", ["Q: {}"], "Q: {}"),
        ("data", "apply_chat_template", [], True),
        ("data", "chat_template_kwargs", ['{"a": 1}'], '{"a": 1}'),
        ("data", "max_samples", ["100"], 100),
        ("data", "prompt_max_len", ["77"], 77),
        ("generation", "generate_max_len", ["55"], 55),
        ("generation", "temperature", ["0.7"], 0.7),
        ("generation", "top_p", ["0.9"], 0.9),
        ("generation", "rollout_engine", ["vllm"], "vllm"),
        ("generation", "vllm_gpu_memory_utilization", ["0.25"], 0.25),
        ("generation", "top_k", ["40"], 40),
        ("generation", "max_num_seqs", ["7"], 7),
        ("generation", "cuda_graphs", [], True),
        ("generation", "engine_check", ["off"], "off"),
        ("ppo", "offload_idle", [], True),
        ("loss", "old_log_probs", ["recompute"], "recompute"),
        ("ppo", "micro_rollout_tokens", ["7"], 7),
        ("ppo", "micro_train_tokens", ["7"], 7),
        ("evaluation", "eval_split", ["dev"], "dev"),
        ("evaluation", "eval_steps", ["10"], 10),
        ("model", "critic_lora_rank", ["7"], 7),
        ("data", "prompt_data_probs", ["some_prompt_data_probs"], "some_prompt_data_probs"),
        ("data", "pretrain_data_probs", ["some_pretrain_data_probs"], "some_pretrain_data_probs"),
        ("data", "data_format", ["hh"], "hh"),
        ("data", "dataset_class", ["some_dataset_class"], "some_dataset_class"),
        ("rewards", "remote_rm_url", ["some_remote_rm_url"], "some_remote_rm_url"),
        ("rewards", "verifiable_reward", ["math", "length"], ("math", "length")),
        ("rewards", "prm_pretrain", ["some_prm_pretrain"], "some_prm_pretrain"),
        ("rewards", "reward_weights", ["a=1", "b=2"], ("a=1", "b=2")),
        ("rewards", "reward_error_value", ["0.25"], 0.25),
        ("rewards", "remote_rm_timeout", ["0.25"], 0.25),
        ("rewards", "remote_rm_retries", ["9"], 9),
        ("rewards", "remote_rm_batch_size", ["7"], 7),
        ("rewards", "remote_rm_token_file", ["some_remote_rm_token_file"], "some_remote_rm_token_file"),
        ("rewards", "verify_regex", ["some_verify_regex"], "some_verify_regex"),
        ("rewards", "verify_length", ["7"], 7),
        ("rewards", "step_separator", ["some_step_separator"], "some_step_separator"),
        ("rewards", "prm_placeholder_token", ["some_prm_placeholder_token"], "some_prm_placeholder_token"),
        ("rewards", "prm_reward_tokens", ["yes", "no"], ("yes", "no")),
        ("rewards", "prm_apply_chat_template", [], True),
        ("rewards", "prm_aggregate", ["min"], "min"),
        ("shaping", "normalize_reward", [], True),
        ("shaping", "reward_normalizer", ["running"], "running"),
        ("shaping", "missing_eos_penalty", ["0.25"], 0.25),
        ("shaping", "overlong_filter", [], True),
        ("shaping", "overlong_buffer_len", ["7"], 7),
        ("shaping", "overlong_penalty_factor", ["0.25"], 0.25),
        ("ppo", "dynamic_sampling", [], True),
        ("ppo", "dynamic_sampling_max_batches", ["7"], 7),
        ("ppo", "freezing_actor_steps", ["7"], 7),
        ("ppo", "value_pretrain_steps", ["7"], 7),
        ("ppo", "enable_ema", [], True),
        ("ppo", "ema_beta", ["0.25"], 0.25),
        ("advantage", "advantage_estimator", ["rloo"], "rloo"),
        ("advantage", "lambd_critic", ["1"], 1.0),
        ("advantage", "adaptive_lambd_alpha", ["0.25"], 0.25),
        ("advantage", "normalize_advantages", ["off"], "off"),
        ("kl", "kl_target", ["0.25"], 0.25),
        ("kl", "kl_horizon", ["7"], 7),
        ("kl", "use_kl_loss", [], True),
        ("loss", "policy_loss_type", ["gspo"], "gspo"),
        ("loss", "eps_clip_high", ["0.25"], 0.25),
        ("loss", "dual_clip", ["0.25"], 0.25),
        ("loss", "cispo_eps_max", ["0.25"], 0.25),
        ("loss", "loss_agg", ["constant"], "constant"),
        ("loss", "entropy_coef", ["0.25"], 0.25),
        ("loss", "rollout_correction", ["mis"], "mis"),
        ("loss", "rollout_correction_low", ["0.25"], 0.25),
        ("loss", "rollout_correction_high", ["0.25"], 0.25),
        ("evaluation", "eval_data", ["some_eval_data"], "some_eval_data"),
        ("evaluation", "eval_before_training", [], True),
        ("evaluation", "eval_n_samples_per_prompt", ["7"], 7),
        ("evaluation", "eval_temperature", ["0.25"], 0.25),
        ("evaluation", "pass_reward", ["0.25"], 0.25),
    ],
    TrainSFTConfig: [
        *RUN,
        *DEEPSPEED,
        *LORA,
        *ADAM,
        *BATCH,
        *SUPERVISED,
        ("data", "input_key", ["question"], "question"),
        ("data", "output_key", ["None"], None),
    ],
    TrainRMConfig: [
        *RUN,
        *DEEPSPEED,
        *LORA,
        *ADAM,
        *BATCH,
        *SUPERVISED,
        ("data", "prompt_key", ["prompt"], "prompt"),
        ("data", "chosen_key", ["good"], "good"),
        ("data", "rejected_key", ["bad"], "bad"),
        ("data", "margin_key", ["margin"], "margin"),
        ("data", "loss", ["logexp"], "logexp"),
        ("data", "value_head_prefix", ["v_head"], "v_head"),
    ],
    TrainPRMConfig: [
        *RUN,
        *DEEPSPEED,
        *LORA,
        *ADAM,
        *BATCH,
        *SUPERVISED,
        ("data", "input_key", ["some_input_key"], "some_input_key"),
        ("data", "label_key", ["some_label_key"], "some_label_key"),
        ("data", "placeholder_token", ["some_placeholder_token"], "some_placeholder_token"),
        ("data", "reward_tokens", ["yes", "no"], ("yes", "no")),
    ],
    GenerateConfig: [
        *PROMPTS,
        ("output", "output_path", ["some_output_path"], "some_output_path"),
    ],
    EvaluateConfig: [
        *PROMPTS,
        ("rewards", "reward_pretrain", ["some_reward_pretrain"], "some_reward_pretrain"),
        ("rewards", "reward_fn", ["some_reward_fn"], "some_reward_fn"),
        ("rewards", "remote_rm_url", ["some_remote_rm_url"], "some_remote_rm_url"),
        ("rewards", "verifiable_reward", ["math", "length"], ("math", "length")),
        ("rewards", "prm_pretrain", ["some_prm_pretrain"], "some_prm_pretrain"),
        ("rewards", "reward_weights", ["a=1", "b=2"], ("a=1", "b=2")),
        ("rewards", "reward_error_value", ["0.25"], 0.25),
        ("rewards", "remote_rm_timeout", ["0.25"], 0.25),
        ("rewards", "remote_rm_retries", ["9"], 9),
        ("rewards", "remote_rm_batch_size", ["7"], 7),
        ("rewards", "remote_rm_token_file", ["some_remote_rm_token_file"], "some_remote_rm_token_file"),
        ("rewards", "verify_regex", ["some_verify_regex"], "some_verify_regex"),
        ("rewards", "verify_length", ["7"], 7),
        ("rewards", "step_separator", ["some_step_separator"], "some_step_separator"),
        ("rewards", "prm_placeholder_token", ["some_prm_placeholder_token"], "some_prm_placeholder_token"),
        ("rewards", "prm_reward_tokens", ["yes", "no"], ("yes", "no")),
        ("rewards", "prm_apply_chat_template", [], True),
        ("rewards", "prm_aggregate", ["min"], "min"),
        ("judgement", "pass_reward", ["0.25"], 0.25),
        ("judgement", "value_head_prefix", ["some_value_head_prefix"], "some_value_head_prefix"),
        ("judgement", "output_path", ["some_output_path"], "some_output_path"),
    ],
    ServeRMConfig: [
        ("server", "reward_pretrain", ["some_reward_pretrain"], "some_reward_pretrain"),
        ("server", "value_head_prefix", ["some_value_head_prefix"], "some_value_head_prefix"),
        ("server", "host", ["some_host"], "some_host"),
        ("server", "port", ["7"], 7),
        ("server", "token_file", ["some_token_file"], "some_token_file"),
        ("server", "max_batch_size", ["7"], 7),
        ("server", "max_len", ["7"], 7),
        ("server", "max_request_mb", ["0.25"], 0.25),
        ("server", "normalize_reward", [], True),
        ("server", "bf16", [], True),
        ("server", "flash_attn", [], True),
        ("server", "trust_remote_code", [], True),
    ],
    MergeLoRAConfig: [
        ("merge", "lora_path", ["some_lora_path"], "some_lora_path"),
        ("merge", "save_path", ["some_save_path"], "some_save_path"),
        ("merge", "pretrain", ["some_pretrain"], "some_pretrain"),
        ("merge", "bf16", [], True),
        ("merge", "trust_remote_code", [], True),
    ],
    ExportConfig: [
        ("model", "checkpoint", ["some_checkpoint"], "some_checkpoint"),
        ("model", "folder", ["some_folder"], "some_folder"),
        ("model", "role", ["critic"], "critic"),
        ("model", "merge", [], True),
        ("model", "bf16", [], True),
        ("model", "pretrain", ["some_pretrain"], "some_pretrain"),
        ("model", "critic_pretrain", ["some_critic"], "some_critic"),
        ("model", "trust_remote_code", [], True),
    ],
}
REQUIRED = {
    TrainPPOConfig: ["--pretrain", "m", "--prompt_data", "d"],
    TrainSFTConfig: ["--pretrain", "m", "--dataset", "d"],
    TrainRMConfig: ["--pretrain", "m", "--dataset", "d"],
    TrainPRMConfig: ["--pretrain", "m", "--dataset", "d"],
    GenerateConfig: ["--pretrain", "m", "--prompt_data", "d", "--output_path", "o"],
    EvaluateConfig: ["--pretrain", "m", "--prompt_data", "d"],
    ServeRMConfig: ["--reward_pretrain", "r"],
    MergeLoRAConfig: ["--lora_path", "l", "--save_path", "s"],
    ExportConfig: ["--checkpoint", "c", "--folder", "f"],
}
EVERY_FLAG = [(command, *flag) for command, flags in FLAGS.items() for flag in flags]
COMMANDS = pytest.mark.parametrize("command", FLAGS, ids=lambda command: command.__name__)


@functools.cache
def with_defaults(command: type) -> Any:
    """The config of a command line with nothing but the required flags."""
    return parse_options(command, REQUIRED[command])


def ppo(*arguments: str) -> dict[str, Any]:
    """The options of a train_ppo command line by name."""
    return flat_dict(parse_options(TrainPPOConfig, [*REQUIRED[TrainPPOConfig], *arguments]))


# Flags


@COMMANDS
def test_the_table_of_this_test_has_every_option(command: type) -> None:
    assert sorted(flag.removeprefix("no_") for _, flag, _, _ in FLAGS[command]) == sorted(option_names(command))


@COMMANDS
def test_no_two_groups_of_a_command_have_an_option_of_the_same_name(command: type) -> None:
    config = with_defaults(command)
    names = [field.name for group in vars(config).values() for field in dataclasses.fields(group)]
    assert sorted(names) == sorted(set(names)) == sorted(option_names(command))


def test_use_wandb_may_stand_alone_or_with_a_key() -> None:
    required = ["--pretrain", "m", "--dataset", "d"]
    for given, key in ((["--use_wandb"], "True"), (["--use_wandb", "abc"], "abc"), (["--use_wandb=abc"], "abc")):
        assert parse_options(TrainSFTConfig, [*given, *required]).tracking.use_wandb == key
        assert parse_options(TrainSFTConfig, [*required, *given]).tracking.use_wandb == key


@pytest.mark.parametrize(("command", "group", "flag", "arguments", "value"), EVERY_FLAG)
def test_a_flag_reaches_the_field_of_its_name_and_no_other(
    command: type, group: str, flag: str, arguments: list[str], value: Any
) -> None:
    before = with_defaults(command)
    after = parse_options(command, [*REQUIRED[command], f"--{flag}", *arguments])
    name = flag.removeprefix("no_")
    assert getattr(getattr(after, group), name) == value
    assert type(getattr(getattr(after, group), name)) is type(value)
    assert flat_dict(before)[name] != value, "the table must not name a default"
    assert {**flat_dict(before), name: value} == flat_dict(after)


@COMMANDS
def test_all_flags_together(command: type) -> None:
    arguments = [part for _, flag, values, _ in FLAGS[command] for part in (f"--{flag}", *values)]
    config = parse_options(command, arguments)
    assert flat_dict(config) == {flag.removeprefix("no_"): value for _, flag, _, value in FLAGS[command]}


@pytest.mark.parametrize("arguments", [["--zero-stage", "1"], ["--zero_stage=1"], ["--zero-stage=1"]])
def test_hyphens_and_equals_signs_are_understood(arguments: list[str]) -> None:
    assert ppo(*arguments)["zero_stage"] == 1


def test_a_value_after_an_equals_sign_is_taken_as_it_is() -> None:
    options = ppo("--input_template=--- {} a-b=c", "--save-path=some-dir/with-hyphens")
    assert options["input_template"] == "--- {} a-b=c"
    assert options["save_path"] == "some-dir/with-hyphens"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], True), (["--no_buffer_cpu_offload"], False), (["--no-buffer-cpu-offload"], False)],
)
def test_a_switch_that_is_on_by_default_has_a_flag_to_turn_it_off(arguments: list[str], value: bool) -> None:
    assert ppo(*arguments)["buffer_cpu_offload"] is value


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--zero_stages", "unknown flag --zero_stages; did you mean --zero_stage?"),
        ("--learning_rate", "did you mean --actor_learning_rate?"),
        ("--num-episode=3", "unknown flag --num_episode; did you mean --num_episodes?"),
        ("--no_gamma", "unknown flag --no_gamma; did you mean --gamma?"),
        ("--xyzzy", "unknown flag --xyzzy; see --help for all options."),
    ],
)
def test_an_unknown_flag_is_an_error_with_the_nearest_name(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match="unknown flag") as error:
        ppo(flag)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--bf16", "true"], "bf16"),
        (["--bf16=False"], "bf16"),
        (["--no-bf16", "1", "--gamma", "1"], "no_bf16"),
        (["--gamma", "1", "--adam_offload", "yes"], "adam_offload"),
    ],
)
def test_a_switch_with_a_value_is_an_error_that_shows_how_to_use_it(arguments: list[str], name: str) -> None:
    switch = name.removeprefix("no_")
    with pytest.raises(ValueError, match=f"--{name} takes no value: use --{switch} or --no_{switch} alone."):
        ppo(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--zero_stage", "5"], "--zero_stage"),
        (["--gamma", "high"], "--gamma"),
        (["--max_samples", "1.5"], "--max_samples"),
        (["--adam_betas", "0.9"], "--adam_betas"),
        (["--kl_estimator", "k4"], "--kl_estimator"),
        (["--save_path"], "--save_path"),
    ],
)
def test_a_value_of_the_wrong_kind_ends_the_command_and_names_the_flag(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ppo(*arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--reward_fn", "a.py", "b.py"], ["--reward_fn=a.py", "b.py"], ["--config"]])
def test_several_values_of_a_flag_that_takes_one_are_named_in_one_line(arguments: list[str], config_file: Path) -> None:
    config_file.write_text("reward_fn: [a.py, b.py]\n")
    given = [*arguments, str(config_file)] if arguments == ["--config"] else arguments
    with pytest.raises(ValueError, match=r"^--reward_fn takes one value, got 2: a\.py b\.py\. Leave the others out\.$"):
        ppo(*given, "--seed", "1")


@pytest.mark.parametrize(("command", "named"), [(TrainPPOConfig, "--prompt_data"), (TrainSFTConfig, "--dataset")])
def test_a_missing_required_flag_ends_the_command_and_is_named(
    command: type, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(command, ["--pretrain", "m"])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@COMMANDS
def test_help_shows_every_flag(command: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(command, ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name in option_names(command):
        assert f"--{name}" in printed
    assert "--config FILE.yaml" in printed


# YAML files


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A file of options; tests write it."""
    return tmp_path / "options.yaml"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("gamma: 0.9", "gamma", 0.9),
        ("gamma: 1", "gamma", 1.0),
        ("actor_learning_rate: 1e-5", "actor_learning_rate", 1e-5),  # a text to YAML 1.1
        ("actor_learning_rate: 1.0e-5", "actor_learning_rate", 1e-5),
        ("zero_stage: 3", "zero_stage", 3),
        ("save_path: a dir", "save_path", "a dir"),
        ("save_path: 2026-11-20", "save_path", "2026-11-20"),
        ("adam_betas: [0.5, 0.6]", "adam_betas", (0.5, 0.6)),
        ("reward_clip_range: [-5, -1.5]", "reward_clip_range", (-5.0, -1.5)),
        ("bf16: true", "bf16", True),
        ("bf16: false", "bf16", False),
        ("buffer_cpu_offload: false", "buffer_cpu_offload", False),
        ("buffer_cpu_offload: yes", "buffer_cpu_offload", True),
        ("value_clip: null", "value_clip", None),
        ("value_clip: None", "value_clip", None),
        ("value_clip: 0.5", "value_clip", 0.5),
        ("top_k: null", "top_k", None),
        ('input_template: "--- {} -x"', "input_template", "--- {} -x"),
        ('input_template: "a: {}\\n\\tb=c"', "input_template", "a: {}\n\tb=c"),
        ('input_key: ""', "input_key", ""),
        ("chat_template_kwargs: {a: [1]}", "chat_template_kwargs", '{"a": [1]}'),
    ],
)
def test_a_file_holds_options_by_the_names_of_the_flags(line: str, name: str, value: Any, config_file: Path) -> None:
    config_file.write_text(line + "\n")
    for arguments in (["--config", str(config_file)], [f"--config={config_file}"]):
        options = ppo(*arguments)
        assert options[name] == value
        assert type(options[name]) is type(value)


@pytest.mark.parametrize(
    ("line", "arguments", "name", "value"),
    [
        ("gamma: 0.9", ["--gamma", "0.8"], "gamma", 0.8),
        ("gamma: 0.9", ["--gamma=0.8"], "gamma", 0.8),
        ("zero_stage: 3", ["--zero-stage", "1"], "zero_stage", 1),
        ("bf16: true", ["--no_bf16"], "bf16", False),
        ("bf16: false", ["--bf16"], "bf16", True),
        ("bf16: true", ["--no-bf16"], "bf16", False),
        ("value_clip: 0.5", ["--value_clip", "None"], "value_clip", None),
        ("adam_betas: [0.5, 0.6]", ["--adam_betas", "0.1", "0.2"], "adam_betas", (0.1, 0.2)),
    ],
)
@pytest.mark.parametrize("file_first", [True, False])
def test_the_command_line_wins_over_the_file(
    line: str, arguments: list[str], name: str, value: Any, file_first: bool, config_file: Path
) -> None:
    config_file.write_text(line + "\n")
    file = ["--config", str(config_file)]
    assert ppo(*(file + arguments if file_first else arguments + file))[name] == value


def test_a_file_may_hold_the_required_options(config_file: Path) -> None:
    config_file.write_text("pretrain: a\nprompt_data: b\n")
    options = flat_dict(parse_options(TrainPPOConfig, ["--config", str(config_file)]))
    assert (options["pretrain"], options["prompt_data"]) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama: 0.9", "unknown option in --config {file}: gama; did you mean gamma?"),
        ("no_bf16: true", "unknown option in --config {file}: no_bf16; did you mean bf16?"),
        ("xyzzy: 1", "unknown option in --config {file}: xyzzy; see --help for all options."),
        ("3: 4", "unknown option in --config {file}: 3; see --help for all options."),
        ("bf16: 'true'", "--config {file}: --bf16 must be true or false, got 'true'."),
        ("use_tensorboard: true", "--config {file}: --use_tensorboard is no switch, got True; write a text as 'True'."),
        ("loss_agg: on", "--config {file}: --loss_agg is no switch, got True; write a text as 'True'."),
        ("bf16: 1", "--config {file}: --bf16 must be true or false, got 1."),
        ("gamma: 1\nseed: 2\n\ngamma: 1", "--config {file}: gamma is in lines 1 and 4; keep one of them."),
        ("'gamma': 1\ngamma: 1", "--config {file}: gamma is in lines 1 and 2; keep one of them."),
        (
            "chat_template_kwargs:\n  a: 1\n  b: [{c: 1, c: 2}]",
            "--config {file}: c is in line 3 twice; keep one of them.",
        ),
        ("chat_template_kwargs: {a: 2024-01-01}", "--config {file}: --chat_template_kwargs must be what JSON can hold"),
        ("save_path: {a: b}", "--config {file}: --save_path takes no mapping, got {{'a': 'b'}}."),
        ("- gamma", "--config {file}: it must hold 'option: value' lines."),
        ("gamma", "--config {file}: it must hold 'option: value' lines."),
        ("", "--config {file}: it must hold 'option: value' lines."),
        ("a: b: c", "--config {file}: mapping values are not allowed here"),
        (None, "--config {file}: [Errno 2] No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_naming_it(text: str | None, message: str, config_file: Path) -> None:
    if text is not None:
        config_file.write_text(text)
    with pytest.raises(ValueError, match="--config") as error:
        ppo("--config", str(config_file))
    assert message.format(file=config_file) in str(error.value)


@pytest.mark.parametrize(
    ("line", "named"), [("value_clip: false", "--value_clip"), ("gamma: [a]", "--gamma"), ("seed: []", "--seed")]
)
def test_a_value_of_the_wrong_kind_in_a_file_names_the_flag(
    line: str, named: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(line)
    with pytest.raises(SystemExit) as ended:
        ppo("--config", str(config_file))
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_config_without_a_file_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--config needs a file: --config FILE\.yaml"):
        ppo("--config")


@COMMANDS
@pytest.mark.parametrize("all_given", [False, True], ids=["defaults", "no default"])
@pytest.mark.parametrize("written_by", ["save_config", "yaml"])
def test_a_config_written_as_yaml_reads_back_to_an_equal_one(
    command: type, all_given: bool, written_by: str, tmp_path: Path
) -> None:
    arguments = [part for _, flag, values, _ in FLAGS[command] for part in (f"--{flag}", *values)]
    config = parse_options(command, arguments) if all_given else with_defaults(command)
    if written_by == "save_config":
        save_config(tmp_path, flat_dict(config))
    else:
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in flat_dict(config).items()}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert parse_options(command, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    "text",
    ["--flag {}", "-x {}", "a=b {}", "'{}'", '"{}"', "{} #", "{}: [x]", " {} ", "{}\n\n", "\\n{}", "ü {}", "=", ""],
)
def test_any_text_survives_the_file(text: str, tmp_path: Path) -> None:
    config = parse_options(TrainPPOConfig, [*REQUIRED[TrainPPOConfig], f"--input_template={text}"])
    assert config.data.input_template == text
    save_config(tmp_path, flat_dict(config))
    assert parse_options(TrainPPOConfig, ["--config", str(tmp_path / "config.yaml")]) == config


# Running


class Job:
    """Remembers that it ran, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ran = 0
        self.error = error

    def fit(self) -> None:
        """Run."""
        self.ran += 1
        if self.error:
            raise self.error

    def close(self) -> None:
        """Note that the job was closed after it ran."""
        self.closed_after = self.ran


GOOD = ["train_ppo.py", "--pretrain", "m", "--prompt_data", "d", "--reward_fn", "f.py"]


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept, without sleeping; the environment describes a single process."""
    slept: list[float] = []
    monkeypatch.setattr("openppo.cli.options.time.sleep", slept.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return slept


def test_a_command_parses_builds_and_runs(monkeypatch: pytest.MonkeyPatch, naps: list[float]) -> None:
    monkeypatch.setattr("sys.argv", [*GOOD, "--gamma", "0.5"])
    seen, job = [], Job()

    def build(config: TrainPPOConfig) -> Job:
        seen.append(config.advantage.gamma)
        return job

    run_command(TrainPPOConfig, build)
    assert (seen, job.ran, job.closed_after) == ([0.5], 1, 1)


def test_options_are_validated_for_the_number_of_ranks_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, naps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", GOOD)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as ended:
        run_command(TrainPPOConfig, lambda config: pytest.fail("built"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: --train_batch_size 128 does not divide among 3 ranks: use a multiple of 3.\n"
    )


def test_an_error_while_building_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", GOOD)

    def build(config: TrainPPOConfig) -> Job:
        raise ValueError("--pretrain m: no such folder.")

    with pytest.raises(SystemExit) as ended:
        run_command(TrainPPOConfig, build)
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: --pretrain m: no such folder.\n"


@pytest.mark.parametrize(("rank", "local_rank"), [("0", "0"), ("2", "0"), ("3", "1")])
def test_on_each_of_several_hosts_the_first_rank_says_what_is_wrong_and_on_which_host(
    rank: str, local_rank: str, monkeypatch: pytest.MonkeyPatch, naps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu02")
    monkeypatch.setattr("sys.argv", [*GOOD, "--gamma", "high"])
    with pytest.raises(SystemExit):
        run_command(TrainPPOConfig, lambda config: pytest.fail("built"))
    assert ("--gamma" in capsys.readouterr().err) == (local_rank == "0")
    monkeypatch.setattr("sys.argv", [*GOOD, "--gama", "1"])
    with pytest.raises(SystemExit):
        run_command(TrainPPOConfig, lambda config: pytest.fail("built"))
    assert capsys.readouterr().err.startswith(f"error on rank {rank} (gpu02): unknown flag --gama")
    assert len(naps) == (2 if local_rank == "1" else 0)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_value_of_the_wrong_kind_is_reported_by_rank_0_alone_and_other_ranks_wait_for_it(
    rank: str, monkeypatch: pytest.MonkeyPatch, naps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*GOOD, "--gamma", "high"])
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        run_command(TrainPPOConfig, lambda config: pytest.fail("built"))
    assert ended.value.code == 2
    assert ("--gamma" in capsys.readouterr().err) == (rank == "0")
    assert bool(naps) == (rank == "1")


def test_an_error_of_ours_and_an_error_while_running_keep_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", GOOD)
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog._exit", lambda watch, status: watch._leaving.set())

    def build(config: TrainPPOConfig) -> Job:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run_command(TrainPPOConfig, build)
    with pytest.raises(ValueError, match="while running"):
        run_command(TrainPPOConfig, lambda config: Job(ValueError("while running")))
    report = capfd.readouterr().err
    assert "Traceback" in report
    assert "fault:   rank 0 raised KeyError: 'ours'" in report
    assert "fault:   rank 0 raised ValueError: while running" in report


def test_switches_of_yaml_turn_off_what_is_off_by_default_and_spell_on_and_off(config_file: Path) -> None:
    config_file.write_text("use_wandb: false\nuse_tensorboard: off\nnormalize_advantages: on\n")
    options = ppo("--config", str(config_file))
    assert (options["use_wandb"], options["use_tensorboard"], options["normalize_advantages"]) == (None, None, "on")
    config_file.write_text("use_wandb: true\nnormalize_advantages: off\n")
    options = ppo("--config", str(config_file))
    assert (options["use_wandb"], options["normalize_advantages"]) == ("True", "off")


@pytest.mark.parametrize("config_type", [TrainSFTConfig, TrainRMConfig])
def test_the_rank_that_deepspeeds_launcher_adds_is_dropped_by_every_command(config_type: Any) -> None:
    arguments = ["--local_rank=1", "--pretrain", "m", "--dataset", "d"]
    assert "local_rank" not in flat_dict(parse_options(config_type, arguments))
