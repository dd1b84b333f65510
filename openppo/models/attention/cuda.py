"""Attention of grouped heads on GPUs in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "openppo_cuda"
_OLDEST_WITH_FLASH = (8, 0)

Capability = tuple[int, int]


def use_cuda_attention(model: PreTrainedModel) -> None:
    """Replace SDPA in a model on GPUs, if its dtype and the GPU need it."""
    if not torch.cuda.is_available() or model.config._attn_implementation != "sdpa":
        return
    capability = torch.cuda.get_device_capability()
    if repeats_keys(model.dtype, capability, masked=False):
        AttentionInterface.register(_NAME, partial(_attend, capability))
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def repeats_keys(dtype: torch.dtype, capability: Capability, masked: bool) -> bool:
    """Whether grouped heads need repeated keys for a fast kernel.

    Only FlashAttention takes grouped heads: in half precision, from sm_80 on, and without a mask. Under a mask
    transformers does what is needed by itself.
    """
    in_flash = dtype in (torch.bfloat16, torch.float16) and capability >= _OLDEST_WITH_FLASH
    return not masked and not in_flash


def _attend(
    capability: Capability,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of (B, H, L, D) to keys (B, G, L, D): (B, L, H, D)."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or not repeats_keys(query.dtype, capability, attention_mask is not None):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if query.shape[2] == 1:  # under a mask, even of nothing, the queries of a group share their keys without a copy
        all_keys = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
        return sdpa_attention_forward(module, query, key, value, all_keys, **options)
    if options.get("is_causal") is None:
        options["is_causal"] = bool(getattr(module, "is_causal", True))
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    no_module: Any = None  # its groups would reach SDPA
    return sdpa_attention_forward(no_module, query, key, value, None, **options)
