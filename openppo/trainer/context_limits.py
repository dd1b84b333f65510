"""Context lengths of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from openppo.models.pretrained import context_length

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    pass


def check_context(
    model_config: PreTrainedConfig, model: str, longest_prompt: int, new_tokens: int
) -> None:
    """Raise ``ValueError`` if a prompt of so many tokens and its response do not fit ``model``: a flag and a name."""
    text = model_config.get_text_config()
    limits = [
        context_length(model_config),
        getattr(text, "keep_window_size", None),
    ]  # beyond that of Doge, and
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        limits.append(
            text.floor_scale - 1
        )  # that of Llama 4, log-probs depend on what else is in a batch
    context = min((limit for limit in limits if limit), default=None)
    if context is not None and longest_prompt + new_tokens > context:
        raise ValueError(
            f"The longest prompt has {longest_prompt} tokens; with --generate_max_len {new_tokens} that exceeds the "
            f"context of {context} tokens of {model}. Lower --generate_max_len or --prompt_max_len."
        )
