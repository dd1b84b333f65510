"""Sampling of the next token, and the end of a response."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config.rollout import ResponseConfig
from openppo.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""
_ONE_LEVEL = 4096
"""Largest vocabulary that is summed in one level, not by blocks."""
_BLOCK = 1024
"""Entries of a block."""
_SHARE_TO_SELECT = 0.25
"""Share of a vocabulary above which top-p sorts all of it."""
_PARTS_OF_CHARACTERS = 8
"""Tokens before a stop string on which its text may depend."""


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the ``Decode`` of a tokenizer."""
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def sampling_params(options: ResponseConfig, temperature: float | None = None) -> SamplingParams:
    """Return the parameters of ``options``; a ``temperature`` of 0 drops top-p and top-k.

    ``temperature`` replaces that of the options.
    """
    temperature = options.temperature if temperature is None else temperature
    is_greedy = temperature <= 0
    return SamplingParams(
        options.generate_max_len,
        temperature=temperature,
        top_p=1.0 if is_greedy else options.top_p,
        top_k=None if is_greedy else options.top_k,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        min_new_tokens=options.min_new_tokens,
    )


def request_uniforms(seed: int, count: int) -> Tensor:
    """Draw the ``count`` numbers in [0, 1) that decide a request's tokens, float64 on the CPU.

    They belong to the request, so its response does not depend on its batch.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def warp_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return logits (B, V) of the distribution to sample from, float32; excluded tokens get -inf.

    Temperature comes first, then top-k, then top-p, as in transformers. Among equally likely tokens top-p keeps an
    arbitrary choice of as many as it has room for.
    """
    logits = logits.float()
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k is not None and params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p != 1:
        logits = _keep_top_p(logits, params.top_p)
    return logits


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep ``logits`` (B, V) of tokens whose likelier ones sum to less than ``top_p``; others get -inf.

    The last token kept and all less likely ones, V at most, have a probability of at least ``1 - top_p`` together. So
    that token has at least ``(1 - top_p) / V``, and only tokens with as much are sorted.
    """
    n_ids = logits.shape[-1]
    probs = logits.softmax(-1)
    if n_ids <= _ONE_LEVEL:
        n_sorted = n_ids
    else:
        unlikely = probs < (1 - top_p) / (2 * n_ids)  # half of it, for rounding
        n_sorted = n_ids - int(unlikely.sum(-1).min())

    if n_sorted > n_ids * _SHARE_TO_SELECT:
        probs, order = probs.sort(dim=-1, descending=True)
    else:
        probs, order = probs.topk(max(1, n_sorted), dim=-1)
    is_excluded = probs.cumsum(-1) - probs >= top_p
    kept = logits.gather(-1, order).masked_fill_(is_excluded, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, kept)


def sample(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    ``logits`` (B, V), ``uniforms`` float (B,) in [0, 1). Returns token ids (B,) and their log-probs (B,) float32 under
    the distribution sampled from (all 0 for the greedy choice of temperature 0).
    """
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=tokens.device)

    log_probs = torch.log_softmax(warp_logits(logits, params), dim=-1)
    probs = log_probs.exp()
    shares = uniforms[:, None].double()
    if probs.shape[-1] <= _ONE_LEVEL:
        tokens = _invert(probs.cumsum(-1, dtype=torch.float64), shares)
    else:
        tokens = _invert_by_blocks(probs, shares)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _invert_by_blocks(probs: Tensor, shares: Tensor) -> Tensor:
    """Token ids (B, 1) at which sums of ``probs`` (B, V) pass ``shares`` (B, 1), found by blocks."""
    n_ids = probs.shape[-1]
    n_in_blocks = n_ids - n_ids % _BLOCK
    sums = probs[:, :n_in_blocks].unflatten(-1, (-1, _BLOCK)).sum(-1)
    remainder = probs[:, n_in_blocks:].sum(-1, keepdim=True)
    sums = torch.cat([sums, remainder], -1)  # (B, blocks)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    block = _invert(cumulative, shares)
    below = shares * cumulative[:, -1:] - cumulative.gather(-1, block)

    places = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = probs.gather(-1, places.clamp(max=n_ids - 1))  # (B, _BLOCK)
    inside.masked_fill_(places >= n_ids, 0)
    shares = (1 + below / sums.gather(-1, block)).clamp_(min=0)  # up to 1 - 2**-53
    tokens = block * _BLOCK + _invert(inside.cumsum(-1, dtype=torch.float64), shares)
    return tokens.clamp_(max=n_ids - 1)  # NaN: past the end


def _invert(cumulative: Tensor, shares: Tensor) -> Tensor:
    """Places (B, 1) at which ``cumulative`` sums (B, N) pass ``shares`` (B, 1) of the last sum.

    Shares are at most ``1 - 2**-53``, and so below the last sum. An entry at such a place is above 0, since the sum at
    the place is above the share.
    """
    places = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
    return places.clamp_(max=cumulative.shape[-1] - 1)  # NaN: past the end


def finish_reason(
    token_ids: Sequence[int], params: SamplingParams, is_end: bool, decode: Decode | None
) -> FinishReason | None:
    """Return why a response ends with the last of ``token_ids``; None if it continues.

    ``is_end``: the last is EOS or a stop token.
    """
    if is_end or completed_stop(token_ids, params, decode) is not None:
        return FinishReason.STOP
    if len(token_ids) == params.max_new_tokens:
        return FinishReason.LENGTH
    return None


def completed_stop(
    token_ids: Sequence[int], params: SamplingParams, decode: Decode | None
) -> str | None:
    """Return the text of ``params.stop`` that the last of ``token_ids`` completes, or None."""
    if not params.stop or len(token_ids) < max(1, params.min_new_tokens):
        return None

    assert decode is not None, "an engine needs a tokenizer to look for stop strings"
    longest = max(len(text.encode()) for text in params.stop)  # a token has at least a byte
    tail = token_ids[-(longest + _PARTS_OF_CHARACTERS) :]
    before = decode(tail[:-1])
    after = decode(tail)
    for text in params.stop:
        if after.count(text) > before.count(text):
            return text
    return None


def text_before_stop(
    text: str, token_ids: Sequence[int], params: SamplingParams, decode: Decode
) -> str:
    """Cut ``text`` of a response before the stop string that ended it, if one did."""
    stop = completed_stop(token_ids, params, decode) if token_ids else None
    if stop is None or stop not in text:
        return text
    return text[: text.rindex(stop)]
