"""Tokenizer and image processor of the policy."""

from functools import partial

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import ModelConfig, RowsConfig, parse_template_kwargs
from openppo.datasets.media import RowVision
from openppo.datasets.vision import Vision
from openppo.models.pretrained import load_processor, load_tokenizer
from openppo.models.vision_models import placeholders
from openppo.types import Prompt


def load_policy_tokenizer(
    pretrain: str, trust_remote_code: bool, options: RowsConfig
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``--pretrain``, with the chat template of ``options`` and its arguments."""
    return load_tokenizer(
        pretrain,
        "--pretrain",
        trust_remote_code=trust_remote_code,
        template_kwargs=parse_template_kwargs(options.chat_template_kwargs),
        chat_template=options.chat_template,
    )


def policy_vision(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
) -> RowVision:
    """Reader of images and videos for the model of ``--pretrain``."""
    load = partial(load_processor, model.pretrain, "--pretrain", model.trust_remote_code)
    return RowVision(
        load,
        list(placeholders(model_config)),
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
    """Reader of the images of a run; None if it has none.

    Prompts have media of these ``kinds``; a run that ``plays`` has agents, which may show images too.
    """
    vision = policy_vision(model, tokenizer, model_config, options=options)
    if kinds:
        return vision
    if plays:
        return vision.for_agents(model_config, f"--pretrain {model.pretrain}")
    return None


def blank_prompt(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
    kinds: set[str],
    plays: bool,
) -> Prompt | None:
    """Stand-in for prompts with images; None if the run has none.

    The arguments are those of ``run_vision``.
    """
    vision = run_vision(
        model,
        tokenizer,
        model_config,
        options=options,
        kinds=kinds,
        plays=plays,
    )
    if vision is None:
        return None
    shown = kinds | {"image"} if plays else kinds
    return vision.blank(sorted(shown))
