"""Tokenizer and image processor of the policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import ModelConfig, RowsConfig, parse_template_kwargs
from openppo.datasets.media import RowVision
from openppo.datasets.vision import Vision
from openppo.media import placeholders
from openppo.models.pretrained import load_processor, load_tokenizer
from openppo.types import Prompt

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    pass


def load_policy_tokenizer(
    pretrain: str, trust_remote_code: bool, options: RowsConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer of ``--pretrain`` with the chat template of ``options`` and its arguments."""
    given = parse_template_kwargs(options.chat_template_kwargs), options.chat_template
    return load_tokenizer(pretrain, "--pretrain", None, trust_remote_code, *given)


def policy_vision(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
) -> RowVision:
    """What reads images and videos for the model of ``--pretrain``."""
    load = partial(load_processor, model.pretrain, "--pretrain", model.trust_remote_code)
    return RowVision(
        load,
        [*placeholders(model_config)],
        tokenizer,
        options=options,
        named=f"--pretrain {model.pretrain}",
    )


def run_vision(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
    kinds: set[str],
    plays: bool,
) -> Vision | None:
    """What reads images of prompts, whose ``kinds`` are known, and those that agents may show, if the run ``plays``."""
    vision = policy_vision(model, tokenizer, model_config, options=options)
    if kinds:
        return vision
    return vision.for_agents(model_config, f"--pretrain {model.pretrain}") if plays else None


def blank_prompt(*of_run: Any) -> Prompt | None:
    """What stands in for prompts with images, of the arguments of ``run_vision``; None where there are none."""
    *_, kinds, plays = of_run
    vision = run_vision(*of_run)
    return None if vision is None else vision.blank(sorted(kinds | ({"image"} if plays else set())))
