"""What forward and backward passes take above the states, in bytes.

Tensors that transformers' Llama-like layers save for the backward pass are counted one by one, as in arXiv 2205.05198
(section 4.1), for attention that does not materialize its scores (SDPA, FlashAttention), and for our own, of bfloat16
models on CPUs and float32 models on GPUs. s is the bytes of an element, a token is a place of the padded (B, L) batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openppo.models.attention import kept_in_bfloat16
from openppo.models.log_probs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CPU
from openppo.rollout.hf_engine import PREFILL_TOKENS
from openppo.rollout.row_cache import SLACK_COLUMNS
from openppo.trainer.estimate.shapes import ModelShape

_FLOAT32 = 4


@dataclass(frozen=True)
class Pass:
    """A forward over ``rows`` x ``length`` tokens that asks for logits at ``scored`` places of each row."""

    rows: int
    length: int
    scored: int
    on_cpu: bool = False

    @property
    def tokens(self) -> int:
        """Places of the batch, padding included."""
        return self.rows * self.length

    def chunks(self, vocabulary: int) -> int:
        """Bytes of float32 copies of logits, and as much for what is made of them (``log_probs.py``)."""
        most = CHUNK_ELEMENTS_ON_CPU if self.on_cpu else CHUNK_ELEMENTS
        return 2 * _FLOAT32 * min(self.rows * self.scored * vocabulary, most)


def saved_per_layer(shape: ModelShape, s: int, lora_rank: int = 0) -> int:
    """Bytes that a layer saves for one token.

    Two norms: their input in float32, what it is normalized to (for the gradient of the norm's weight), and their
    output, which feeds linear layers. Attention: queries, keys, values, its output, a float32 log-sum-exp per head.
    MLP: with a gate, the gate, its activation, the other branch and the product, else input and output of the
    activation, and three more for a GELU that Python puts together. Norms of queries and keys (Qwen3) save like the
    others. Frozen weights (LoRA) save no normalized input; each adapter saves what is between its matrices.
    """
    norm = _FLOAT32 + (0 if lora_rank else s)
    norms = 2 * (norm + s) * shape.hidden
    attention = 2 * s * (shape.queries + shape.keys)
    if shape.normed_queries:
        norms += norm * (shape.queries + shape.keys)
    mlp = s * (4 if shape.gated else 5 if shape.composed_gelu else 2) * shape.intermediate
    adapters = s * lora_rank * len(shape.linears) // shape.layers
    return norms + attention + mlp + adapters


def passing_per_token(shape: ModelShape, s: int) -> int:
    """Most bytes that a layer holds at a time for one token without saving: the MLP, its input and the residual."""
    return s * (2 * shape.hidden + (3 if shape.gated else 2) * shape.intermediate)


def saved_by_layers(shape: ModelShape, batch: Pass, s: int, checkpointing: bool, lora_rank: int = 0) -> int:
    """What all layers save; with ``checkpointing`` their inputs, and all of the one that is computed again."""
    layer = saved_per_layer(shape, s, lora_rank) * batch.tokens
    if batch.on_cpu and s == torch.bfloat16.itemsize:
        layer += kept_in_bfloat16(batch.rows, shape.heads, batch.length)
    if not batch.on_cpu and s == _FLOAT32:  # keys and values are repeated there, see attention/cuda.py
        layer += 2 * s * (shape.queries - shape.keys) * batch.tokens
    if checkpointing:
        return shape.layers * s * shape.hidden * batch.tokens + layer
    return shape.layers * layer


def saved_by_head(shape: ModelShape, batch: Pass, s: int, lora_rank: int = 0) -> int:
    """The last norm, like the others, and the places whose logits are asked for, which the head's weight needs."""
    if lora_rank:
        return _FLOAT32 * shape.hidden * batch.tokens
    return (_FLOAT32 + s) * shape.hidden * batch.tokens + s * shape.hidden * batch.rows * batch.scored


def logits_and_gradient(shape: ModelShape, batch: Pass, s: int) -> int:
    """Logits, their gradient and float32 chunks of them."""
    elements = batch.rows * batch.scored * shape.vocabulary
    return 2 * s * elements + batch.chunks(shape.vocabulary)


def training_peak(shape: ModelShape, batch: Pass, s: int, checkpointing: bool, lora_rank: int = 0) -> int:
    """Where the backward pass begins: all that is saved, and gradients at the logits or in the last layer."""
    saved = saved_by_layers(shape, batch, s, checkpointing, lora_rank) + saved_by_head(shape, batch, s, lora_rank)
    at_logits = logits_and_gradient(shape, batch, s)
    return saved + max(at_logits, passing_per_token(shape, s) * batch.tokens)


def inference_peak(shape: ModelShape, batch: Pass, s: int) -> int:
    """A pass without gradients: the largest layer, or logits with float32 chunks of them."""
    elements = batch.rows * batch.scored * shape.vocabulary
    hidden = s * shape.hidden * (2 * batch.tokens + batch.rows * batch.scored)
    logits = hidden + s * elements + batch.chunks(shape.vocabulary)
    return max(passing_per_token(shape, s) * batch.tokens, logits if elements else 0)


def generation_peaks(shape: ModelShape, rows: int, prompt: int, new: int, s: int, warps: bool) -> tuple[int, int]:
    """Bytes of the key-value cache, and the most beside it: reading prompts or sampling.

    While prompts are read, masked attention repeats keys and values for each head, and the mask is made into numbers.
    ``sample`` holds logits, log-probs, probabilities and their float64 sums (B, V), and four more float32 tensors if
    top-k or top-p ``warps`` them.
    """
    cache = s * shape.cache_per_token * rows * (prompt + new + SLACK_COLUMNS)
    sampling = rows * shape.vocabulary * (s + 2 * _FLOAT32 + 8 + (4 * _FLOAT32 if warps else 0))
    tokens = min(rows * prompt, max(PREFILL_TOKENS, prompt))
    attention = s * (3 * shape.queries + 2 * shape.hidden) * tokens + (1 + s) * tokens * prompt
    return cache, max(sampling, passing_per_token(shape, s) * tokens, attention)
