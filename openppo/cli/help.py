"""``--help``: the options of a command, with forms, defaults and docstrings of their fields."""

import dataclasses
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from openppo.config import Options, TrainPPOConfig
from openppo.config.fields import declared_options, is_group, rules_of
from openppo.config.foreign import shown_in_help
from openppo.config.recipe_files import recipe_names
from openppo.config.schema import docstrings

COMMON = frozenset(
    """
    pretrain ref_pretrain critic_pretrain freeze_vision_tower critic_lora_rank save_value_network
    prompt_data pretrain_data data_format input_key label_key input_template apply_chat_template tools_key image_key
    video_key prompt_max_len
    reward_pretrain reward_fn verifiable_reward
    normalize_reward reward_clip_range missing_eos_penalty overlong_buffer_len
    num_episodes max_steps rollout_batch_size n_samples_per_prompt dynamic_sampling actor_learning_rate
    critic_learning_rate micro_rollout_batch_size micro_train_tokens
    advantage_estimator gamma lambd normalize_advantages init_kl_coef kl_estimator use_kl_loss
    policy_loss_type eps_clip eps_clip_high loss_agg value_clip generate_max_len temperature
    eval_data eval_steps eval_before_training eval_temperature pass_on
    tools environment agent_command agent max_turns rollout_ranks max_staleness running_requests tasks
    train_batch_size micro_train_batch_size max_epochs lr_scheduler lora_rank lora_alpha lora_path load_in_4bit
    zero_stage bf16 gradient_checkpointing adam_offload seed
    save_path logging_steps stop_when use_tensorboard use_wandb save_steps load_checkpoint
    """.split()
)
"""Options of train_ppo that a plain ``--help`` shows: those of README, the recipes and examples/scripts."""
_FIRST = ("model", "data", "rewards", "shaping", "ppo", "advantage", "kl", "loss", "generation")
"""Groups that come before the others."""
_INPUTS = ("pretrain", "prompt_data", "dataset")
"""Options that come first in their groups."""
_ABOUT_FILES = "--config FILE.yaml reads 'option: value' lines, as logs/config.yaml has them; flags override them."
_ABOUT_RECIPES = f"--recipe NAME reads those of an algorithm first: {', '.join(recipe_names())}."
_FILES_TITLE = "Few people turn these: lines of --config FILE.yaml, and no flags."
_TYPES = {"str": "TEXT", "int": "N", "float": "X", "bool": ""}


def help_page(
    config_type: type[Options], program: str, everything: bool = False, positional: bool = False
) -> str:
    """Return the help of a command; of train_ppo the common options only, unless ``everything`` is wanted.

    With ``positional`` the required options are given without their names.
    """
    options = declared_options(config_type)
    shown = {name for name, option in options.items() if not rules_of(option).of_files}
    is_short = config_type is TrainPPOConfig and not everything
    if is_short:
        shown &= COMMON

    required = [name for name, option in options.items() if _is_required(option)]
    words = [program, *(name.upper() for name in required if positional), "[OPTIONS]"]
    lines = [f"usage: {' '.join(words)}", ""]
    lines += _wrapped(config_type.__doc__ or "", indent="")
    if options:
        lines += _wrapped(_ABOUT_FILES, indent="")
    if config_type is TrainPPOConfig:
        lines += _wrapped(_ABOUT_RECIPES, indent="")
    if is_short:
        n_others = len(options) - len(shown)
        lines += _wrapped(
            f"These are the common options; --help all shows {n_others} more.", indent=""
        )
    about_names = shown_in_help(options)
    if about_names:
        lines += ["", *_wrapped(about_names, indent="")]

    for group, names in _groups(config_type).items():
        texts = docstrings(group)
        blocks = [
            _option(options[name], group, text=texts[name], positional=positional)
            for name in names
            if name in shown
        ]
        title = "Options:" if group is config_type else group.__doc__ or ""
        lines += _section(title, blocks)

    if not is_short:
        blocks = [
            _option(options[name], group, text=docstrings(group)[name])
            for group, names in _groups(config_type).items()
            for name in names
            if name not in shown
        ]
        lines += _section(_FILES_TITLE, blocks)
    return "\n".join(lines).rstrip() + "\n"


def value_form(hint: Any) -> str:
    """Return the form of an option's value: ``N``, ``{on,off}``, ``TEXT ...``; empty for a switch."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"{value_form(arguments[0])} ..."
    if origin is tuple:
        return " ".join(map(value_form, arguments))
    if arguments:  # X | None
        return value_form(next(kind for kind in arguments if kind is not type(None)))
    return _TYPES[hint.__name__]


def default_text(value: Any) -> str:
    """Return a default as people write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).replace("\n", "\\n")


def _groups(config_type: type[Options]) -> dict[type[Options], list[str]]:
    """Return names of options by the class that has them, the most important groups first."""
    hints = typing.get_type_hints(config_type)
    groups = {name: hint for name, hint in hints.items() if is_group(hint)}
    single = [field.name for field in dataclasses.fields(config_type) if field.name not in groups]

    ordered: dict[type[Options], list[str]] = {config_type: single} if single else {}
    for name in [*filter(groups.__contains__, _FIRST), *groups]:
        names = declared_options(groups[name])
        ordered[groups[name]] = sorted(names, key=lambda name: name not in _INPUTS)
    return ordered


def _section(title: str, blocks: list[list[str]]) -> list[str]:
    """Lines of a group of options, with its title; none for an empty group."""
    if not blocks:
        return []
    if sys.stdout.isatty():
        title = f"\x1b[1m{title}\x1b[0m"
    lines = ["", title]
    for block in blocks:
        lines += block
    return lines


def _option(
    option: dataclasses.Field, group: type[Options], text: str, positional: bool = False
) -> list[str]:
    """Lines of one option: its form, then its meaning and default."""
    form = value_form(typing.get_type_hints(group)[option.name])
    rules = rules_of(option)
    if _is_required(option) and positional:
        usage = option.name.upper()
    elif rules.of_files:
        usage = f"{option.name}: {form or '{true,false}'}"
    elif not form:
        usage = f"--{option.name}, --no_{option.name}"
    else:
        usage = f"--{option.name} [{form}]" if rules.alone else f"--{option.name} {form}"

    if _is_required(option):
        text += " (required)"
    elif option.default not in (None, (), ""):
        text += f" (default: {default_text(option.default)})"
    return [f"  {usage}", *_wrapped(text, indent=" " * 6)]


def _is_required(option: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return option.default is missing and option.default_factory is missing


def _wrapped(text: str, indent: str) -> Iterator[str]:
    """Break a text into lines of the terminal's width, at most 110."""
    width = min(shutil.get_terminal_size().columns, 110)
    for line in text.splitlines():
        yield from textwrap.wrap(
            line, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
