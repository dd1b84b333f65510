"""An OpenRLHF 0.6.1 train_ppo command line: every flag of its parser is known, and does or says the right thing."""

import os
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
import yaml

from openppo.cli import openrlhf
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainSFTConfig, flat_dict
from openppo.config.fields import declared_options

DOCUMENT = Path(__file__).parents[3] / "docs" / "openrlhf.md"

SAME: dict[str, Any] = yaml.safe_load("""
    {save_path: ./ckpt, save_steps: -1, save_hf_ckpt: false, max_ckpt_num: 3, ckpt_path: ./ckpt/checkpoints_ppo,
    load_checkpoint: false, logging_steps: 1, eval_steps: -1, num_episodes: 1, rollout_batch_size: 512,
    micro_rollout_batch_size: 8, max_epochs: 1, prompt_max_len: 1024, generate_max_len: 1024, max_samples: 1000000,
    max_norm: 1.0, l2: 0.0, ptx_coef: 0.05, eps_clip: 0.2, value_clip: 0.2, lambd: 0.95, gamma: 1,
    micro_train_batch_size: 4, train_batch_size: 128, normalize_reward: false, top_p: 1.0, temperature: 1.0,
    freezing_actor_steps: -1, n_samples_per_prompt: 1, save_value_network: false, actor_learning_rate: 1.0e-6,
    critic_learning_rate: 9.0e-6, lr_warmup_ratio: 0.03, kl_target: null, init_kl_coef: 0.01, kl_estimator: k1,
    adam_betas: [0.9, 0.95], reward_clip_range: [-10, 10], seed: 42, zero_stage: 2, gradient_checkpointing: false,
    bf16: false, zpg: 1, adam_offload: false, flash_attn: false, overlap_comm: false,
    advantage_estimator: gae, use_kl_loss: false, load_in_4bit: false, lora_rank: 0, lora_alpha: 16, target_modules:
    all-linear, lora_dropout: 0, pretrain: null, reward_pretrain: null, remote_rm_url: null, critic_pretrain: null,
    value_head_prefix: score, prompt_data: null, prompt_data_probs: '1.0', prompt_split: train, pretrain_data: null,
    pretrain_data_probs: '1.0', pretrain_split: train, input_key: input, label_key: null, input_template: null,
    apply_chat_template: false, use_tensorboard: null, use_wandb: null}
""")
"""Flags of openrlhf/cli/train_ppo.py (0.6.1) and their defaults there; false: a switch, a list: several values."""
REWRITTEN = {"enable_ema": "ema_beta", **openrlhf.WANDB_VARIABLES}
"""Flags by what they are here, an option or a variable."""
DROPPED = [
    "max_ckpt_mem 100000000",
    "local_rank 0",
    "actor_init_on_gpu",
    "aux_loss_coef 0",
    "grad_accum_dtype fp32",
]
DROPPED += ["gradient_checkpointing_use_reentrant", "disable_fast_tokenizer"]
REFUSED = {
    "disable_ds_ckpt": "--save_steps 0",
    "max_len 2048": "--prompt_max_len and --generate_max_len",
    "aux_loss_coef 0.01": "Leave it out",
    "grad_accum_dtype bf16": "float32",
    "use_ms": "--pretrain",
    "vllm_num_engines 4": "it is of OpenRLHF's train_ppo_ray",
}
SWITCHES = ("overlap_comm", "normalize_reward")
"""They may stand alone here, and have a value too."""
# each is explained in the document; that of --target_modules only in form: a tuple here
DEFAULTS_THAT_DIFFER = {
    "overlap_comm",
    "ckpt_path",
    "input_key",
    "max_samples",
    "micro_rollout_batch_size",
    "micro_train_batch_size",
    "pretrain",
    "pretrain_data_probs",
    "prompt_data",
}
DEFAULTS_THAT_DIFFER |= {"prompt_data_probs", "target_modules", "normalize_reward"}
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
    return flat_dict(
        parse_options(TrainPPOConfig, ["--pretrain", "m", "--prompt_data", "d", *arguments])
    )


def test_every_flag_of_the_parser_is_listed_once_and_in_the_document():
    names = {*SAME, *REWRITTEN, *(flag.split()[0] for flag in [*DROPPED, *REFUSED])}
    names -= {"vllm_num_engines"}
    assert len(names) == 85, "openrlhf/cli/train_ppo.py has 85 flags"
    assert [name for name in names if f"`{name}`" not in DOCUMENT.read_text()] == []
    foreign = {*openrlhf.DROPPED, *openrlhf.REFUSED, *REWRITTEN}
    assert foreign & declared_options(TrainPPOConfig).keys() == set()


def test_flags_have_the_same_form_and_default_but_for_those_that_the_document_explains():
    ours = declared_options(TrainPPOConfig)
    theirs = {
        name: tuple(default) if isinstance(default, list) else default
        for name, default in SAME.items()
    }
    for name, default in theirs.items():
        assert (ours[name].type == "bool") == (default is False and name not in SWITCHES), name
        assert ("tuple" in str(ours[name].type)) == (
            isinstance(default, tuple) or name == "target_modules"
        ), name
    assert {
        name for name, default in theirs.items() if ours[name].default != default
    } == DEFAULTS_THAT_DIFFER
    assert ours["pretrain"].default is MISSING


def test_switches_are_read_when_they_stand_alone():
    options = parse("--overlap_comm", "--normalize_reward", "--bf16")
    assert (options["overlap_comm"], options["normalize_reward"]) == ("on", "model")


def test_options_of_files_are_flags_where_openrlhf_has_them():
    words = "--zpg 8 --value_head_prefix value --kl_horizon 20".split()
    options = parse(*words)
    assert [options[name] for name in ("zpg", "value_head_prefix", "kl_horizon")] == [
        8,
        "value",
        20,
    ]


def test_an_average_of_the_weights_has_openrlhfs_default():
    assert parse("--enable_ema")["ema_beta"] == 0.992
    assert parse("--enable_ema", "--ema_beta", "0.5")["ema_beta"] == 0.5
    assert parse("--ema_beta=0.5", "--enable_ema")["ema_beta"] == 0.5


@pytest.mark.parametrize("command", [TrainPPOConfig, TrainSFTConfig])
def test_flags_of_wandb_become_its_variables_with_one_line_each(command, monkeypatch, capsys):
    for variable in openrlhf.WANDB_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    data = "--dataset" if command is TrainSFTConfig else "--prompt_data"
    words = [
        "--pretrain",
        "m",
        data,
        "d",
        "--use_wandb",
        "--wandb_project",
        "sums",
        "--wandb_org=us",
    ]
    parse_options(command, words)
    assert (os.environ["WANDB_PROJECT"], os.environ["WANDB_ENTITY"]) == ("sums", "us")
    assert capsys.readouterr().err.splitlines() == [
        "--wandb_project of OpenRLHF is read as WANDB_PROJECT=sums.",
        "--wandb_org of OpenRLHF is read as WANDB_ENTITY=us.",
    ]


@pytest.mark.parametrize("flag", DROPPED)
def test_flag_without_a_meaning_here_is_dropped_with_one_line_on_rank_0(flag, capsys, monkeypatch):
    for words in (f"--{flag}".split(), [f"--{flag.replace(' ', '=')}"]):
        assert parse(*words, "--bf16") == parse("--bf16")
        notices = capsys.readouterr().err.splitlines()
        assert len(notices) == (0 if flag == "local_rank 0" else 1)
        assert all(notice.startswith(f"--{flag} ") and ": " in notice for notice in notices)
    monkeypatch.setenv("RANK", "1")
    parse(*words)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("flag", "remedy"), REFUSED.items())
def test_flag_whose_effect_cannot_be_had_is_refused_with_a_remedy(flag, remedy):
    with pytest.raises(ValueError) as refused:
        parse(*f"--{flag}".split())
    assert str(refused.value).startswith(f"--{flag} does not exist here: ")
    assert remedy in str(refused.value)


def test_example_of_openrlhf_becomes_the_config_it_means(capsys):
    config = parse_options(TrainPPOConfig, ["--local_rank=3", *LLAMA.split()])
    config.validate(world_size=8)
    given = yaml.safe_load("""
        {bf16: true, apply_chat_template: true, normalize_reward: model, adam_offload: true, flash_attn: true,
        gradient_checkpointing: true, load_checkpoint: true, pretrain: OpenRLHF/Llama-3-8b-sft-mixture,
        reward_pretrain: OpenRLHF/Llama-3-8b-rm-mixture, save_path: ./checkpoint/llama-3-8b-rlhf,
        micro_train_batch_size: 2, micro_rollout_batch_size: 4, rollout_batch_size: 1024, actor_learning_rate: 5.0e-7,
        prompt_data: OpenRLHF/prompt-collection-v0.1, input_key: context_messages, max_samples: 100000}
    """)  # all its other flags repeat defaults
    assert flat_dict(config) == parse() | given
    assert capsys.readouterr().err == ""


def test_a_penalty_by_k3_in_the_reward_is_refused():
    """It is OpenRLHF's ``--kl_estimator k3`` without ``--use_kl_loss``."""
    config = parse_options(TrainPPOConfig, [*LLAMA.split(), "--kl_estimator", "k3"])
    with pytest.raises(
        ValueError, match="--kl_estimator k3 as a reward .* --kl_estimator k1, .* --use_kl_loss"
    ):
        config.validate(world_size=8)
