"""Choosing the next token (temperature, top-k, top-p, one uniform number per row), and whether it is the last."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config.rollout import ResponseConfig
from openppo.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""
_BLOCK = 1024  # entries that are summed together where a vocabulary has more than ``_ONE_LEVEL``
_ONE_LEVEL = 4096
_SHARE_TO_SELECT = 0.25  # of the vocabulary; more is sorted as a whole
_PARTS_OF_CHARACTERS = 8  # tokens before a stop string that its text may depend on


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """``Decode`` of a tokenizer."""
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def sampling_params(options: ResponseConfig, temperature: float | None = None) -> SamplingParams:
    """What the options say; ``temperature`` replaces theirs, and 0 leaves top-p and top-k out."""
    temperature = options.temperature if temperature is None else temperature
    top_p, top_k = (options.top_p, options.top_k) if temperature > 0 else (1.0, None)
    ends = options.stop, options.stop_token_ids, options.min_new_tokens
    return SamplingParams(options.generate_max_len, temperature, top_p, top_k, *ends)


def request_uniforms(seed: int, count: int) -> Tensor:
    """The ``count`` numbers in [0, 1) that decide a request's tokens, float64 on the CPU.

    They belong to the request, so its response does not depend on the batch it is decoded in.
    """
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def warp_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (B, V) of the distribution that is sampled from, float32; excluded tokens get -inf.

    Temperature first, then top-k, then top-p, as transformers does. Of equally likely tokens top-p keeps as many as it
    has room for, whichever.
    """
    logits = logits.float()
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k is not None and params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits if params.top_p == 1 else _keep_top_p(logits, params.top_p)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """``logits`` (B, V) of the likeliest tokens whose likelier ones have less than ``top_p`` together, else -inf.

    The last of them and all that are less likely, V at most, have at least ``1 - top_p`` together. So it has at least
    ``1 - top_p`` by V, and only tokens that do are sorted.
    """
    n_ids, probs = logits.shape[-1], logits.softmax(-1)
    if n_ids <= _ONE_LEVEL:
        n_sorted = n_ids
    else:
        unlikely = probs < (1 - top_p) / (2 * n_ids)  # half of it, for rounding
        n_sorted = n_ids - int(unlikely.sum(-1).min())
    if n_sorted > n_ids * _SHARE_TO_SELECT:
        probs, order = probs.sort(dim=-1, descending=True)
    else:
        probs, order = probs.topk(max(1, n_sorted), dim=-1)
    kept = logits.gather(-1, order).masked_fill_(probs.cumsum(-1) - probs >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, kept)


def sample(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    ``logits`` (B, V), ``uniforms`` float (B,) in [0, 1). Returns token ids (B,) and their log-probs (B,) float32
    under the distribution sampled from (all 0 for the greedy choice of temperature 0).
    """
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=tokens.device)
    log_probs = torch.log_softmax(warp_logits(logits, params), dim=-1)
    n_ids, shares = log_probs.shape[-1], uniforms[:, None].double()
    if n_ids <= _ONE_LEVEL:
        tokens = _invert(log_probs.exp().cumsum(-1, dtype=torch.float64), shares)
    else:
        probs, whole = log_probs.exp(), n_ids - n_ids % _BLOCK  # (B, V)
        sums = probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], -1)  # (B, blocks)
        cumulative = sums.cumsum(-1, dtype=torch.float64)
        block = _invert(cumulative, shares)
        below = shares * cumulative[:, -1:] - cumulative.gather(-1, block)
        places = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
        inside = probs.gather(-1, places.clamp(max=n_ids - 1)).masked_fill_(
            places >= n_ids, 0
        )  # (B, _BLOCK)
        shares = (1 + below / sums.gather(-1, block)).clamp_(min=0)  # as far as 1 - 2**-53
        tokens = block * _BLOCK + _invert(inside.cumsum(-1, dtype=torch.float64), shares)
        tokens.clamp_(max=n_ids - 1)  # NaN: past the end
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _invert(cumulative: Tensor, shares: Tensor) -> Tensor:
    """Places (B, 1) where ``cumulative`` sums (B, N) pass ``shares`` (B, 1), below 1, of the last.

    None of them adds 0: a share of at most ``1 - 2**-53`` is below the last sum, and the sum found is above the share.
    """
    places = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
    return places.clamp_(max=cumulative.shape[-1] - 1)  # NaN: past the end


def finish_reason(
    token_ids: Sequence[int], params: SamplingParams, is_end: bool, decode: Decode | None
) -> FinishReason | None:
    """Why a response of ``token_ids`` ends with the last of them, which ``is_end`` tells an end token; None if not."""
    if is_end or completed_stop(token_ids, params, decode) is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) == params.max_new_tokens else None


def completed_stop(
    token_ids: Sequence[int], params: SamplingParams, decode: Decode | None
) -> str | None:
    """The text of ``params.stop`` that the last of ``token_ids`` completes; None if it completes none."""
    if not params.stop or len(token_ids) < max(1, params.min_new_tokens):
        return None
    assert decode is not None, "an engine needs a tokenizer to look for stop strings"
    longest = max(len(text.encode()) for text in params.stop)  # a token has at least a byte
    tail = token_ids[-(longest + _PARTS_OF_CHARACTERS) :]
    before, after = decode(tail[:-1]), decode(tail)
    return next((text for text in params.stop if after.count(text) > before.count(text)), None)


def text_before_stop(
    text: str, token_ids: Sequence[int], params: SamplingParams, decode: Decode
) -> str:
    """``text`` of a response without the stop string that ended it, and what its last token has after that."""
    stop = completed_stop(token_ids, params, decode) if token_ids else None
    return text if stop is None or stop not in text else text[: text.rindex(stop)]
