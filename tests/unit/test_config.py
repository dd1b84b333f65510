"""Options: published defaults, and errors that name the flag and the remedy."""

import ast
import dataclasses
import itertools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import openppo.config
from openppo.config import (
    RewardConfig,
    TrackingConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    chat,
    flat_dict,
    from_options,
    mask_credentials,
    parse_probs,
    tools,
)
from openppo.config.fields import Options, declared_options, rules_of, spelling
from openppo.experience.forwards import old_log_probs_from

COMMANDS: dict[str, tuple[type, dict[str, Any]]] = {
    "ppo": (TrainPPOConfig, {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"}),
    "sft": (TrainSFTConfig, {"pretrain": "m", "dataset": "d"}),
    "rm": (TrainRMConfig, {"pretrain": "m", "dataset": "d"}),
    "prm": (TrainPRMConfig, {"pretrain": "m", "dataset": "d"}),
    "generate": (tools.GenerateConfig, {"pretrain": "m", "prompt_data": "d", "output_path": "o"}),
    "evaluate": (tools.EvaluateConfig, {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"}),
    "serve": (tools.ServeRMConfig, {"reward_pretrain": "r"}),
    "serve_agent": (tools.ServeAgentConfig, {"pretrain": "m"}),
    "merge": (tools.MergeLoRAConfig, {"lora_path": "l", "save_path": "s"}),
    "export": (tools.ExportConfig, {"checkpoint": "c", "folder": "f"}),
    "chat": (chat.ChatConfig, {"folder": "m"}),
    "report": (tools.ReportConfig, {"run_dirs": ("r",)}),
}
"""A config of each command, and options with which it works."""


def config_of(command: str, **changes: Any) -> Any:
    """The config of a command that works, with some options changed."""
    config_type, options = COMMANDS[command]
    return from_options(config_type, **(options | changes))


def validate(line: str) -> None:
    """Validate a command with options ``name=value``, where ``ranks`` is the number of ranks."""
    command, *words = shlex.split(line)
    given = dict(word.split("=", 1) for word in words)
    ranks = int(given.pop("ranks", "1"))
    kinds = {
        name: str(declared.type)
        for name, declared in declared_options(COMMANDS[command][0]).items()
    }
    texts = {
        name for name in given if kinds[name] in ("str", "str | None") and given[name] != "None"
    }
    values = {name: text if name in texts else yaml.safe_load(text) for name, text in given.items()}
    config_of(
        command, **{name: None if value == "None" else value for name, value in values.items()}
    ).validate(ranks)


def test_defaults_of_supervised_training_are_the_published_ones():
    """Of OpenRLHF 0.6.1, but for --max_len; those of train_ppo are in tests/unit/cli/test_openrlhf.py."""
    common = {
        "train_batch_size": 128,
        "max_epochs": 1,
        "learning_rate": 5e-6,
        "l2": 0.0,
        "lr_warmup_ratio": 0.03,
    }
    common |= {
        "adam_betas": (0.9, 0.95),
        "zero_stage": 2,
        "seed": 42,
        "lora_alpha": 16,
        "max_len": 512,
    }
    own = {
        "sft": {},
        "rm": {"chosen_key": "chosen", "rejected_key": "rejected", "loss": "sigmoid"},
        "prm": {},
    }
    for command, more in own.items():
        assert flat_dict(config_of(command)).items() >= (common | more).items()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_is_frozen_and_valid_by_default(command):
    for world_size in (1, 2, 4, 8) if command in ("ppo", "sft", "rm", "prm") else (1,):
        config_of(command).validate(world_size)
    config = config_of(command)
    for options in [
        config,
        *(group for group in vars(config).values() if isinstance(group, Options)),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, dataclasses.fields(options)[0].name, None)


def test_every_option_is_explained_in_sentences():
    files = Path(openppo.config.__file__).parent.glob("*.py")
    classes = [
        node
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    pairs = [
        pair
        for group in classes
        if group.name.endswith("Config")
        for pair in itertools.pairwise(group.body)
    ]
    options = [
        (f, text)
        for f, text in pairs
        if isinstance(f, ast.AnnAssign) and "Config" not in ast.unparse(f)
    ]
    assert len(options) > 200
    for field, text in options:
        assert isinstance(text, ast.Expr), ast.unparse(field)
        assert re.fullmatch(r"[A-Z].*\.", ast.literal_eval(text.value), re.DOTALL), ast.unparse(
            field
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_out_of_bounds_is_an_error_that_names_flag_and_bound(command):
    for name, declared in declared_options(COMMANDS[command][0]).items():
        allowed, kind = rules_of(declared), str(declared.type)
        tried = (
            ["", -2, -1, 0, 70000]
            if "str" in kind or "int" in kind
            else [-0.5, 0.0, 1.0, 1.1, math.nan, 1e9]
        )
        fitting = [value for value in tried if isinstance(value, str) == ("str" in kind)]
        wrong = [
            value
            for value in fitting
            if allowed.bound is not None and not allowed.bound.holds(value)
        ]
        assert wrong or allowed.bound is None, name
        for value in wrong:
            with pytest.raises(ValueError) as error:
                pair = declared.default if isinstance(declared.default, tuple) else ()
                config_of(
                    command, **{name: (value, *pair[1:]) if "tuple" in kind else value}
                ).validate(1)
            assert str(error.value).startswith(f"{spelling(declared)} {allowed.bound.says}"), name
            assert allowed.note in str(error.value)


BAD = """
ppo adam_betas=[0.9,1.0] | must lie in [0, 1), got 0.9 1.
ppo top_p=0.0 | must lie in (0, 1], got 0.
ppo value_clip=0.0 | must be positive, got 0; None switches it off.
ppo heartbeat_timeout=4.0 | must lie in [5, 3600], got 4.
ppo zero_stage=4 | must be 0, 1, 2 or 3, got 4.
ppo zero_stage=true | must be 0, 1, 2 or 3, got True.
ppo actor_learning_rate="'1e-6'" | must be float, got '1e-6'.
ppo rollout_batch_size=64.0 | must be int, got 64.0.
ppo bf16="'false'" | must be bool, got 'false'.
ppo max_samples="'7'" | must be int | None, got '7'.
ppo adam_betas=[0.9] | must be tuple[float, float], got (0.9,).
ppo verifiable_reward=[maths] | must be exact_match, math, regex:PATTERN or length:TOKENS, got maths
sft keep_best=eval_loss | eval_loss compares ... --eval_dataset
ppo keep_best=eval_reward | eval_reward compares ... --eval_data
ppo keep_best=eval_pass@1 eval_data=e reward_pretrain=r | eval_pass@1: which reward...passes...--pass_reward
ppo pass_on=rihgt reward_fn=None verifiable_reward=[length:5] | names rihgt, but the rewards are reward
ppo pass_on=prm reward_pretrain=r prm_pretrain=p | prm: which reward of a reward model ... passes...--pass_reward
ppo pass_on=reward reward_fn=None reward_pretrain=r | reward: which reward of a reward model...--pass_reward
ppo pass_on= | must not be empty
evaluate pass_on=rihgt reward_fn=None reward_pretrain=r | names rihgt, but the rewards are reward
evaluate pass_on=reward_model reward_pretrain=r | reward_model: which reward of a reward model...--pass_reward
ppo keep_best=reward | reward is not an evaluation metric
ppo dry_run=x | must stand alone, or name ranks and GiB of each GPU as 8x80, 8x or x80, got x
ppo dry_run=3x | ...--train_batch_size 128 ... among 3 ranks: use a multiple of 3
sft adam_offload=true zero_stage=0 | needs ... use --zero_stage 1, 2 or 3
sft train_batch_size=5 ranks=2 | 5 ... among 2 ranks: use a multiple of 2
ppo ckpt_path=~/run | must be the path of a folder; "~" is not expanded here, got ~/run
ppo save_path=~/run | must be the path of a folder; "~" is not expanded here, got ~/run
ppo normalize_reward=mean | must be off, model, running or group, got 'mean'
ppo normalize_reward=group | group compares ... use --n_samples_per_prompt of at least 2
ppo normalize_reward=group n_samples_per_prompt=2 advantage_estimator=group_norm | ...the same
ppo normalize_reward=group n_samples_per_prompt=2 advantage_estimator=remax | ...a greedy resp
ppo reward_timeout=1.0 | 1.0 has no effect without --reward_workers: give --reward_workers too, or leave it out.
evaluate reward_timeout=1.0 | 1.0 has no effect without --reward_workers
ppo tasks=t.yaml max_steps=1 reward_fn=None prompt_data="" eval_reward_fn=f.py | ...its eval_reward_fn too
ppo eval_reward_fn=f.py | scores evaluations: give held-out prompts with --eval_data
ppo keep_best=eval_pass@1 eval_data=e remote_rm_url=http://h | eval_pass@1: which reward...--pass_reward
ppo reward_clip_range=[1.0,1.0] | needs two rising numbers, got 1.0 1.0
ppo reward_fn=None | ...No reward is given: pass --reward_pretrain MODEL, --reward_fn FILE.py[:name]
ppo reward_fn=none | none learns from the KL to another model: name it with --ref_pretrain
ppo reward_fn=none ref_pretrain=r init_kl_coef=0.0 | none learns ... give a positive --init_kl_coef
ppo reward_fn=none ref_pretrain=r reward_pretrain=m | ...--reward_pretrain is about rewards ... leave one of them out
ppo reward_fn=none ref_pretrain=r verifiable_reward=[math] | ...--verifiable_reward is about ... leave one of them out
ppo reward_fn=none ref_pretrain=r reward_weights=[a=1] | ...--reward_weights is about rewards
ppo reward_fn=none ref_pretrain=r normalize_reward=running | ...--normalize_reward is about
ppo reward_fn=none ref_pretrain=r missing_eos_penalty=1.0 | ...--missing_eos_penalty is about rewards
ppo reward_fn=none ref_pretrain=r dynamic_sampling=true | ...--dynamic_sampling is about rewards
ppo reward_fn=none ref_pretrain=r kl_target=1.0 | ...--kl_target is about rewards
ppo reward_fn=none ref_pretrain=r pass_on=a | ...--pass_on is about rewards
ppo advantage_estimator=rloo reward_fn=none ref_pretrain=r | rloo compares rewards ... use reinforce or gae
ppo use_kl_loss=true kl_estimator=k2 reward_fn=none ref_pretrain=r | ...add --advantage_estimator reinforce
ppo eval_data=e reward_fn=none ref_pretrain=r | with --reward_fn none measures the KL ... add --eval_temperature 1
ppo keep_best=eval_reward eval_data=e eval_temperature=1.0 reward_fn=none ref_pretrain=r | eval_reward looks ... eval_kl
ppo keep_best=eval_kl eval_data=e eval_reward_fn=f.py reward_fn=none ref_pretrain=r | eval_kl ... add --eval_temperature
ppo "stop_when=['reward > 1']" reward_fn=none ref_pretrain=r | ...'reward > 1' looks at a reward
ppo eval_reward_fn=none eval_data=e | none: only --reward_fn can be none
ppo reward_fn=none ref_pretrain=r environment=e.py:E n_envs=128 | none: --environment gives rewards of its own
ppo reward_fn=none ref_pretrain=r agent=a.py:solve | none: --agent gives rewards of its own
ppo reward_fn=none ref_pretrain=r tasks=t.yaml max_steps=1 prompt_data="" | none is for a run of one task
evaluate reward_fn=none | none leaves nothing to evaluate: use openppo.cli.generate
ppo tool_rewards=none tools=t.py reward_fn=None | none: rewards of --tools t.py are not added. No reward is given: pass
evaluate tool_rewards=none tools=t.py reward_fn=None | none: rewards of --tools t.py are not added. No reward is given
ppo tool_rewards=none agent=a.py | none has no effect without --tools: give --tools too, or leave it out
ppo "input_template={} {}" | must contain {} once, where the prompt goes; got '{} {}'
ppo chat_template_kwargs={} | {} has no effect without --apply_chat_template: give
sft chat_template=f | f has no effect without --apply_chat_template: give
rm scores_key=s | s has no effect without --responses_key: give
rm responses_key=r margin_key=m | ...--margin_key is about pairs, and --responses_key names rankings
rm tools_key=t | t has no effect without --apply_chat_template: give
ppo tools=t.py prompt_truncation=left | ...left cuts no conversation of agents: use drop or error
evaluate tools=t.py reward_fn=f.py tools_key=t apply_chat_template=true | ...no agent can run: leave it out
sft apply_chat_template=true chat_template_kwargs=a=1 | ...--chat_template_kwargs a=1: not a JSON obj
ppo rollout_batch_size=6 train_batch_size=4 n_samples_per_prompt=2 ranks=4 | 6 does not divide among 4...multiple of 4
ppo rollout_batch_size=6 train_batch_size=4 n_samples_per_prompt=3 ranks=2 | 6 x ...= 18 samples...a divisor of
ppo advantage_estimator=reinforce_baseline | reinforce_baseline compares ... use --n_samples_per_prompt of at least 2
ppo advantage_estimator=rloo | rloo compares ... use --n_samples_per_prompt of at least 2
ppo advantage_estimator=group_norm | group_norm compares ... use --n_samples_per_prompt of at least 2
ppo advantage_estimator=dr_grpo | dr_grpo compares ... use --n_samples_per_prompt of at least 2
ppo dynamic_sampling=true | ...use --n_samples_per_prompt of at least 2
ppo kl_target=1.0 kl_horizon=102 | ...kl_horizon 102 is too short for a step of 512 samples
ppo policy_loss_type=pppo | must be ppo, gspo, cispo, double_sided, decoupled, or path.py:name of your own, got pppo.
ppo advantage_estimator=my.py | must be gae, ... or path.py:name of your own, got my.py.
ppo prompt_order=random | must be shuffled, given, or path.py:name of your own, got random.
ppo kl_controller=my.py | must be path.py:name, got my.py.
ppo kl_controller=my.py:C init_kl_coef=0.0 | ...--init_kl_coef 0 loads no reference ...: use a positive one
ppo environment=g.py reward_fn=None prompt_data="" n_envs=128 max_steps=1 prompt_order=given | ...orders ...: leave it
ppo kl_target=6.0 init_kl_coef=0.0 | ...--init_kl_coef 0 ...: use a positive one
ppo use_kl_loss=true init_kl_coef=0.0 kl_estimator=k3 | ...give a positive --init_kl_coef
ppo use_kl_loss=true | with --kl_estimator k1 ... Use --kl_estimator k2 or k3
ppo kl_estimator=k2 | k2 as a reward ...Use --kl_estimator k1, or put it into the loss with --use_kl_loss
ppo kl_estimator=k3 kl_target=1.0 | k3 as a reward ...Use --kl_estimator k1, or put it into the loss with --use_kl_loss
ppo rollout_correction=[none,high=2] | none corrects nothing: leave high=2 out
ppo rollout_correction=sequence | begins with none, tis, mis or icepop, got 'sequence'
ppo rollout_correction=[tis,top=2] | takes low=NUMBER, high=NUMBER, veto=NUMBER and level=NAME, got 'top=2'
ppo rollout_correction=[mis,level=word] | level= takes token, sequence or geometric, got 'word'
ppo rollout_correction=[tis,veto=1] | veto=1.0 must lie in (0, 1)
ppo rollout_correction=[mis,low=-1] | low=-1.0 must not be negative
ppo rollout_correction=[tis,high=0] | high=0.0 must be positive
ppo dual_clip=3.0 policy_loss_type=double_sided | ...double_sided has none: leave --dual_clip out
ppo old_log_probs=recompute policy_loss_type=double_sided | recompute ... leave it out, or use ... decoupled
ppo old_log_probs=rollout policy_loss_type=decoupled | rollout ... Leave it out, or use ... double_sided
ppo rollout_correction=tis policy_loss_type=double_sided | tis ... Leave it out, or use --policy_loss_type ppo
ppo rollout_correction=mis policy_loss_type=decoupled | mis ... Leave it out, or use --policy_loss_type ppo
ppo dual_clip=3.0 policy_loss_type=cispo | ...leave --dual_clip out
ppo rollout_correction=[tis,low=0.5] | tis cuts above only: leave low=0.5 out, or use mis or icepop
ppo rollout_correction=[mis,low=2,high=1] | low=2.0 must be below high=1.0
ppo overlong_buffer_len=2000 | 2000 is longer than --generate_max_len 1024
ppo normalize_reward=true | ...no --reward_pretrain has mean and std: use --normalize_reward running
ppo reward_weights=[a] | takes NAME=NUMBER ... got 'a'
ppo reward_weights=[a=1,a=2] | names 'a' twice
ppo reward_fn=None reward_pretrain=r prm_pretrain=p reward_weights=[prm=1,reward=2] | ...are reward_model, prm. Use
evaluate reward_fn=None reward_pretrain=r reward_weights=[prm=1] | ...names prm, but the rewards are reward. Use
ppo reward_fn=None remote_rm_url=http://h reward_weights=[remote=2] | ...names remote, but the rewards are reward.
ppo verifiable_reward=[regex] | must be exact_match, math, regex:PATTERN or length:TOKENS, got regex
ppo verifiable_reward=[length:0] | must be exact_match, math, regex:PATTERN or length:TOKENS, got length:0
ppo verifiable_reward=[math,math] | names one of math math twice
ppo verifiable_reward=[math] input_key=q | ...math compares with a label: ... --label_key
ppo prompt_data="" | ...No prompts are given: pass --prompt_data FILE
ppo "prm_reward_tokens=['+','+']" | needs two different tokens, got + +
prm "reward_tokens=['+','+']" | needs at least two different tokens, got + +
ppo prompt_data=a,,b | 'a,,b' has an empty name between commas
ppo prompt_data=a,b prompt_data_probs=0.5 | ...one positive number for each of the 2 sources
ppo prompt_data=a,b prompt_data_probs=0.5,nan | ...--prompt_data_probs '0.5,nan': give one positive
ppo pretrain_data=a pretrain_data_probs=0 | ...--pretrain_data_probs '0': give one positive
sft dataset=a,b dataset_probs=1,x | ...--dataset_probs '1,x': give one positive number for each of the 2
ppo eval_n_samples_per_prompt=4 | 4 ...: raise --eval_temperature
generate n_samples_per_prompt=2 | 2 with --temperature 0 gives one response...raise --temperature
ppo eval_before_training=true | needs --eval_data
ppo val_only=true | needs --eval_data
ppo val_only=true eval_data=e rollout_ranks=1 ranks=2 | evaluates on the ranks that train...: leave out --rollout_ranks
ppo dump_max_mib=1.0 | 1.0 has no effect without --dump_rollouts: give --dump_rollouts too, or leave it out
ppo dump_rollouts= | must be the path of a folder
ppo dump_max_mib=0 dump_rollouts=d | must be positive
ppo zpg=2 ranks=2 | 2 partitions weights, ... use --zero_stage 3
sft "stop_when=['loss < 1',kl]" | 'kl': write a metric, one of > >= < <=
sft "stop_when=['> 0.2']" eval_dataset=e | '> 0.2': write a metric, one of > >= < <=
sft "stop_when=['kl == 1']" | 'kl == 1': write a metric, one of > >= < <=
sft "stop_when=['kl > nan']" | 'kl > nan': write a metric, one of > >= < <=
ppo "stop_when=['eval_reward>1']" | 'eval_reward>1' looks at evaluations: ...--eval_data
rm "stop_when=['eval/a b/loss < 1']" | ...looks at evaluations: ...--eval_dataset
ppo ref_pretrain=r init_kl_coef=0.0 | ...--ref_pretrain: --init_kl_coef 0 uses no reference model
ppo target_modules=[] | needs at least one name, or 'all-linear'
sft load_in_4bit=true | ...give --lora_rank
ppo load_in_4bit=true lora_rank=4 zero_stage=3 | ...--load_in_4bit: ... --zero_stage 0, 1 or 2
evaluate reward_fn=None | ...No reward is given
serve host=0.0.0.0 | 0.0.0.0 can be reached by others: give a --token_file
export critic_pretrain=c | has an effect with --role critic only: add --role critic
export folder=c | ...FOLDER c is CHECKPOINT c
export folder="" | ...FOLDER is empty
export ranks=2 | ...export runs in one process
chat ranks=2 | ...chat runs in one process
chat folder="" | ...FOLDER is empty
chat chat_template_kwargs=[] | ...not a JSON object
report run_dirs=[] | ...name the folder of a run
ppo cuda_graphs="'on'" rollout_engine=vllm | works with --rollout_engine hf only
ppo rollout_engine=vllm load_in_4bit=true lora_rank=4 | vllm takes whole weights
ppo vllm_tensor_parallel_size=2 ranks=2 | 2 works with --rollout_engine vllm only
ppo vllm_tensor_parallel_size=2 rollout_engine=vllm ranks=3 train_batch_size=6 rollout_batch_size=6 | ...use a divisor
ppo vllm_tensor_parallel_size=2 rollout_engine=vllm rollout_ranks=2 running_requests=drain ranks=2 | 2: --rollout_ranks
ppo offload_idle=true adam_offload=true | ...leave one of them out
ppo old_log_probs=rollout top_k=5 | rollout: with --top_p, --top_k or --min_new_tokens
ppo top_k=-2 | must be at least -1, got -2
ppo min_new_tokens=9 generate_max_len=8 | 9 exceeds --generate_max_len 8
ppo rollout_correction=tis old_log_probs=rollout | tis compares the engine
sft zero_stage=3 compile="'on'" | ...--compile does not see how --zero_stage 3 gathers...leave it out
ppo profile_steps=3- | 3-: give steps from 1 and rising ranges
ppo profile_steps=0 | 0: give steps from 1 and rising ranges
ppo profile_steps=1,,2 | 1,,2: give steps from 1 and rising ranges
"""
"""Command and options, and parts of the error, which begins with the first flag unless "..." stands there."""


@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_options_that_cannot_work_are_an_error_with_flag_and_remedy(row):
    line, message = row.split(" | ", 1)
    with pytest.raises(ValueError) as error:
        validate(line)
    first, *others = message.split("...")
    said = str(error.value)
    name = line.split()[1].strip('"').partition("=")[0]
    assert said.removeprefix("--").startswith(f"{name} {first.strip()}" if first else "")
    assert [part for part in others if part.strip() not in said] == []


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("command", ["ppo", "generate", "evaluate", "serve_agent"])
def test_top_k_0_and_minus_1_mean_all_tokens(command, value):
    config = config_of(command, top_k=value)
    config.validate()
    assert flat_dict(config)["top_k"] is None
    if command == "ppo":
        assert old_log_probs_from(config, single_update=True) == "rollout", "nothing is cut off"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_number_may_be_nan_or_infinite(command, number):
    accepted = []
    for name, declared in declared_options(COMMANDS[command][0]).items():
        if "float" in str(declared.type):
            pair = declared.default if isinstance(declared.default, tuple) else ()
            values = [(*pair[:at], number, *pair[at + 1 :]) for at in range(len(pair))] or [number]
            for value in values:
                try:
                    config_of(command, **{name: value}).validate(1)
                except ValueError as error:
                    assert str(error).startswith(f"{spelling(declared)} ")
                else:
                    accepted.append(name)
    assert accepted == ["reward_clip_range"] * (
        command == "ppo" and math.isinf(number)
    )  # at one of its ends


EDGES = """
ppo value_clip=None gamma=0.0 lambd=0.0 init_kl_coef=0.0 ptx_coef=0.0 max_norm=0.0 l2=0.0 seed=0
ppo actor_learning_rate=0.0 critic_learning_rate=0 top_p=1.0e-9 top_k=1 max_samples=1 adam_betas=[0.0,0.0]
ppo rollout_batch_size=6 n_samples_per_prompt=4 train_batch_size=12 ranks=3
ppo reward_fn=None reward_pretrain=r normalize_reward=true
ppo advantage_estimator=rloo reward_fn=None prompt_data="" tasks=t.yaml max_steps=1
ppo reward_pretrain=r verifiable_reward=[length:5]
ppo normalize_reward=running
ppo normalize_reward=group n_samples_per_prompt=2
ppo reward_workers=2 reward_timeout=0.5
ppo keep_best=eval_pass@1 eval_data=e remote_rm_url=http://h eval_reward_fn=f.py
ppo kl_target=6.0 use_kl_loss=true kl_estimator=k3
ppo reward_fn=none ref_pretrain=r
ppo reward_fn=none ref_pretrain=r tools=t.py tool_rewards=none overlong_filter=true
ppo reward_fn=none ref_pretrain=r eval_data=e eval_reward_fn=f.py reward_workers=2 pass_on=right keep_best=eval_reward
ppo reward_fn=none ref_pretrain=r eval_data=e temperature=0.7 eval_temperature=0.7 keep_best=eval_kl
ppo reward_fn=./none
ppo init_kl_coef=0.0 kl_estimator=k3
ppo dynamic_sampling=true n_samples_per_prompt=2 freezing_actor_steps=0
ppo reward_weights=[a=1,b=-0.5]
ppo reward_fn=None agent=a.py:f reward_weights=[right=1,short=0.5]
ppo reward_fn=None tools=t.py reward_weights=[right=1]
ppo reward_fn=None environment=e.py:E reward_weights=[reward=2]
ppo reward_fn=None "agent_command=python a.py" reward_weights=[right=1]
ppo reward_fn=None verifiable_reward=[math] agent=a.py:f reward_weights=[right=1]
ppo reward_fn=None prompt_data="" tasks=t.yaml max_steps=1 reward_weights=[right=1]
evaluate reward_fn=None agent=a.py:f reward_weights=[right=2]
ppo reward_fn=None remote_rm_url=f.py:g reward_weights=[a=1]
ppo reward_fn=None reward_pretrain=r reward_weights=[reward=1]
ppo load_in_4bit=true lora_rank=4 critic_lora_rank=0
ppo pass_on=right
ppo pass_on=right reward_fn=None agent=a.py:f
ppo pass_on=right reward_fn=None prompt_data="" tasks=t.yaml max_steps=1
ppo pass_on=right eval_data=e reward_fn=None reward_pretrain=r eval_reward_fn=f.py
ppo pass_on=math reward_pretrain=r verifiable_reward=[math] label_key=a keep_best=eval_pass@1 eval_data=e
ppo pass_on=reward pass_reward=0 reward_fn=None reward_pretrain=r
evaluate pass_on=right reward_fn=None agent=a.py:f
ppo input_template={}
sft adam_offload=true zero_stage=1 eval_steps=1 max_steps=1 max_len=2
rm margin_key=m loss=sigmoid
serve host=0.0.0.0 token_file=t
"""


@pytest.mark.parametrize("line", EDGES.strip().splitlines())
def test_options_at_the_edge_of_what_works_are_accepted(line):
    validate(line)


def test_weights_have_names_shares_sum_to_one_and_steps_have_ranges():
    assert RewardConfig(reward_weights=("right=1", "a=b=-.5")).weights() == {
        "right": 1.0,
        "a=b": -0.5,
    }
    assert parse_probs("a, b", "3,1", "prompt_data") == [("a", 0.75), ("b", 0.25)]
    assert parse_probs("a,b", None, "prompt_data") == [("a", None), ("b", None)]
    for given, steps in (("3", {3}), ("2-4,7", {2, 3, 4, 7}), (" 1 , 1-2 ", {1, 2}), (None, set())):
        assert TrackingConfig(profile_steps=given).profiled_steps() == steps


def test_a_bool_stands_for_on_or_off_as_in_configs_of_earlier_runs():
    configs = (from_options(TrainPPOConfig, pretrain="m", compile=value) for value in (True, False))
    assert [config.deepspeed.compile for config in configs] == ["on", "off"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_is_its_options_by_name(command):
    config_type, required = COMMANDS[command]
    options = flat_dict(config_of(command))
    assert list(options) == list(declared_options(config_type)), "in the order of the groups"
    assert from_options(config_type, **options) == config_of(command)
    with pytest.raises(
        ValueError, match=f"{config_type.__name__} has no option eps_clipp; see --help"
    ):
        config_of(command, eps_clipp=0.1)
    if "init_kl_coef" in options:
        assert config_of(command, init_kl_coeff=0.3, ptx_coeff=0.4) == config_of(
            command, init_kl_coef=0.3, ptx_coef=0.4
        )
        with pytest.raises(ValueError, match="ptx_coeff is ptx_coef under another name"):
            from_options(config_type, **options, ptx_coeff=0.4)
    with pytest.raises(TypeError, match=next(iter(required))):
        from_options(config_type, **dict(list(required.items())[1:]))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:password@host:5000/get_reward", "http://***@host:5000/get_reward"),
        ("https://token@host,http://a:b@c:d@host/x", "https://***@host,http://***@host/x"),
        (
            "http://host/get_reward?key=secret&b=1,http://other/",
            "http://host/get_reward?***,http://other/",
        ),
        ("http://host/@x", "http://host/@x"),
        ("me@example.com /data/a@b.jsonl", "me@example.com /data/a@b.jsonl"),
    ],
)
def test_secrets_are_masked_where_options_are_written(text, masked):
    assert mask_credentials(text) == masked
    config = config_of("ppo", remote_rm_url=text, use_wandb="5ecre7")
    assert (flat_dict(config)["remote_rm_url"], config.rewards.remote_rm_url) == (masked, text)
    assert (flat_dict(config)["use_wandb"], config.tracking.use_wandb) == ("True", "5ecre7")


def test_what_stands_for_a_value_of_an_option_becomes_it():
    given = {
        "actor_learning_rate": 1,
        "save_path": Path("a/b"),
        "target_modules": ["q_proj"],
        "stop_when": "kl > 1",
    }
    made = {
        "actor_learning_rate": 1,
        "save_path": "a/b",
        "target_modules": ("q_proj",),
        "stop_when": ("kl > 1",),
    }
    config = config_of("ppo", **given)
    config.validate(1)
    assert flat_dict(config).items() >= made.items()


WHOLE = {"bf16": True, "rollout_batch_size": 8, "train_batch_size": 8}
"""One optimizer step trains on all samples of a rollout."""


@pytest.mark.parametrize(
    ("options", "single_update", "later"),
    [
        ({"bf16": False}, "rollout", "rollout"),
        ({}, "training", "recompute"),
        ({"lora_rank": 4}, "training", "recompute"),
        ({"old_log_probs": "rollout"}, "rollout", "rollout"),
        ({"policy_loss_type": "double_sided", "top_p": 0.9}, "rollout", "rollout"),
        ({"policy_loss_type": "decoupled", "bf16": False}, "recompute", "recompute"),
        *(
            (more, "recompute", "recompute")
            for more in (
                *(
                    {"max_epochs": 2},
                    {"train_batch_size": 4},
                    {"lora_rank": 4, "lora_dropout": 0.1},
                    {"top_p": 0.9},
                ),
                *({"old_log_probs": "recompute"}, {"top_k": 5}, {"rollout_correction": "tis"}),
                {"rollout_correction": "tis", "bf16": False},
            )
        ),
    ],
)
def test_old_log_probs_come_from_where_they_are_the_policys(options, single_update, later):
    config = config_of("ppo", **WHOLE | options)
    assert (old_log_probs_from(config, True), old_log_probs_from(config, False)) == (
        single_update,
        later,
    )


def test_a_source_of_ones_own_evaluates_without_held_out_data():
    options = {
        "keep_best": "eval_reward",
        "stop_when": ("eval_reward>=0.9",),
        "eval_before_training": True,
    }
    from_options(TrainPPOConfig, pretrain="m", **options).validate(1, own_source=True)
    with pytest.raises(ValueError, match="--eval_data"):
        config_of("ppo", **options).validate(1)
