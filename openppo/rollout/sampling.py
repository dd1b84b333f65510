"""Choosing the next token: temperature, top-k, top-p, and one uniform number per row."""

import torch
from torch import Tensor

from openppo.types import SamplingParams


def request_uniforms(seed: int, count: int) -> Tensor:
    """The ``count`` numbers in [0, 1) that decide a request's tokens, float64 on the CPU.

    They belong to the request, so its response does not depend on the batch it is decoded in.
    """
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def warp_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (B, V) of the distribution that is sampled from, float32; excluded tokens get -inf.

    Temperature first, then top-k, then top-p, as transformers does.
    """
    logits = logits.float() / params.temperature
    if params.top_k is not None and params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
        ordered = ordered.masked_fill(before >= params.top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


def sample(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    ``logits`` (B, V), ``uniforms`` float (B,) in [0, 1). Returns token ids (B,) and their log-probs (B,) float32
    under the distribution sampled from (all 0 for the greedy choice of temperature 0).
    """
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=tokens.device)
    log_probs = torch.log_softmax(warp_logits(logits, params), dim=-1)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)  # (B, V)
    total = cumulative[:, -1:]
    # Strictly below the total, and the first entry strictly above the target: never a token of probability 0.
    target = torch.minimum(uniforms[:, None].to(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(
        max=cumulative.shape[-1] - 1
    )  # NaN: past the end
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]
