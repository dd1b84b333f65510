"""Context lengths of models."""

from transformers import PreTrainedConfig

from openppo.models.pretrained import context_length


def check_context(
    model_config: PreTrainedConfig, model: str, longest_prompt: int, new_tokens: int
) -> None:
    """Raise ``ValueError`` if a prompt and its response exceed the context of ``model``.

    ``model`` is a flag and a name; ``longest_prompt`` and ``new_tokens`` are numbers of tokens.
    """
    text = model_config.get_text_config()
    limits = [context_length(model_config)]

    # Beyond these limits of Doge and Llama 4, log-probs depend on the other rows of a batch.
    limits.append(getattr(text, "keep_window_size", None))
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        limits.append(text.floor_scale - 1)

    context = min((limit for limit in limits if limit), default=None)
    if context is not None and longest_prompt + new_tokens > context:
        raise ValueError(
            f"The longest prompt has {longest_prompt} tokens; with --generate_max_len {new_tokens} that exceeds the "
            f"context of {context} tokens of {model}. Lower --generate_max_len or --prompt_max_len."
        )
