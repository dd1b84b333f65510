"""Weights rounded to bf16."""

from typing import Any

import torch


def to_bf16(model: Any) -> None:
    """Round the weights of a Hugging Face or PEFT model, in place."""
    # Buffers keep their dtype: rotary frequencies must stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
