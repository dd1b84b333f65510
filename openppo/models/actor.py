"""The policy: a causal language model whose forward returns log-probs of the tokens it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from openppo.models.loading import apply_lora, disable_dropout, load_options
from openppo.models.log_probs import entropy_from_logits, log_probs_from_logits


class Actor(nn.Module):
    """A causal language model as policy (or as reference).

    ``pretrain_or_model`` is a local folder or hub name, loaded with ``bf16`` and ``flash_attn``, or a model that is
    loaded already; ``.model`` is the module (with LoRA the PEFT model). Dropout is switched off. ``temperature`` is
    the sampling temperature; log-probs and entropy are those of softmax(logits / temperature), in float32.
    """

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        bf16: bool = False,
        flash_attn: bool = False,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        target_modules: str | Sequence[str] = "all-linear",
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        model = pretrain_or_model
        if isinstance(model, str):
            model = _load(model, bf16, flash_attn)
        disable_dropout(model)
        self.model: nn.Module = model
        if lora_rank > 0:
            self.model = apply_lora(model, lora_rank, lora_alpha, lora_dropout, target_modules)
        self.temperature = temperature

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor | None = None,
        temperature: float | None = None,
        return_entropy: bool = False,
        position_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs of ``sequences``, token-aligned: entry t is log p(token t | tokens before t).

        ``sequences`` int64, ``attention_mask`` and ``action_mask`` bool, all (B, L), padded on the right.
        Returns float32 (B, L), 0 where ``action_mask`` (default: ``attention_mask``) is not set and for the
        first token; with ``return_entropy`` also the entropy in nats of the distribution token t came from.
        Logits are computed only at positions that some row asks for. ``position_ids`` int64 (B, L) that start again
        at 0 mark several documents in one row, which do not see each other (see ``packing_is_exact``); the first
        token of each must not be in ``action_mask``.
        """
        wanted = attention_mask.bool() if action_mask is None else action_mask.bool()
        positions = wanted[:, 1:].any(0).nonzero()[:, 0]  # (K,): the state before token positions + 1
        if len(positions) == 0:  # a row without any action still takes part in the forward
            positions = positions.new_zeros(1)
        # No attention mask: padding is on the right, and a causal model never looks there. SDPA then keeps its
        # fast causal kernel.
        options = {} if position_ids is None else {"position_ids": position_ids}
        logits = self.model(input_ids=sequences, logits_to_keep=positions, use_cache=False, **options).logits
        temperature = self.temperature if temperature is None else temperature
        log_probs = log_probs_from_logits(logits, sequences[:, positions + 1], temperature)  # (B, K)
        result = _place(log_probs, positions + 1, wanted)
        if not return_entropy:
            return result
        return result, _place(entropy_from_logits(logits, temperature), positions + 1, wanted)


def _load(name: str, bf16: bool, flash_attn: bool) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **load_options(bf16, flash_attn))
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{name} is no whole causal language model: it lacks {', '.join(missing[:5])}, which would be random. "
            "Give a checkpoint that has them."
        )
    return model


def _place(values: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """``values`` (B, K) put at ``positions`` (K,) of a (B, L) tensor, 0 where not ``wanted`` and at token 0."""
    placed = torch.zeros(wanted.shape, dtype=values.dtype, device=values.device).index_copy(1, positions, values)
    return torch.where(F.pad(wanted[:, 1:], (1, 0)), placed, 0.0)
