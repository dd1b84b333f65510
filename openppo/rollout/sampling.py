"""Choosing the next token (temperature, top-k, top-p, one uniform number per row), and whether it is the last."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config.rollout import ResponseConfig
from openppo.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""
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
    tokens = torch.searchsorted(cumulative, target, right=True)
    tokens.clamp_(max=cumulative.shape[-1] - 1)  # NaN: past the end
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def sample_rows(
    logits: Tensor,
    uniforms: Tensor,
    params: Sequence[SamplingParams],
    n_sampled: Sequence[int],
    eos_token_ids: Collection[int],
) -> tuple[list[int], list[float]]:
    """``sample`` for rows with ``params`` of their own, of which ``n_sampled`` tokens are there already."""
    early = [row for row, n in enumerate(n_sampled) if n < params[row].min_new_tokens]
    if early:
        logits = logits.clone()
    for row in early:
        logits[row, [*eos_token_ids, *params[row].stop_token_ids]] = -torch.inf
    tokens, chosen = [0] * len(params), [0.0] * len(params)
    for kind in set(params):
        rows = [row for row, its in enumerate(params) if its == kind]
        part = rows if len(rows) < len(params) else slice(None)
        drawn, log_probs = sample(logits[part], uniforms[part], kind)
        for row, token, log_prob in zip(rows, drawn.tolist(), log_probs.tolist(), strict=True):
            tokens[row], chosen[row] = token, log_prob
    return tokens, chosen


def finish_reason(
    token_ids: Sequence[int], params: SamplingParams, eos_token_ids: Collection[int], decode: Decode | None
) -> FinishReason | None:
    """Why a response of ``token_ids`` ends with the last of them; None if it does not."""
    last = token_ids[-1]
    if last in eos_token_ids or last in params.stop_token_ids or completed_stop(token_ids, params, decode) is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) == params.max_new_tokens else None


def completed_stop(token_ids: Sequence[int], params: SamplingParams, decode: Decode | None) -> str | None:
    """The text of ``params.stop`` that the last of ``token_ids`` completes; None if it completes none."""
    if not params.stop or len(token_ids) < max(1, params.min_new_tokens):
        return None
    assert decode is not None, "an engine needs a tokenizer to look for stop strings"
    longest = max(len(text.encode()) for text in params.stop)  # a token has at least a byte
    tail = token_ids[-(longest + _PARTS_OF_CHARACTERS) :]
    before, after = decode(tail[:-1]), decode(tail)
    return next((text for text in params.stop if after.count(text) > before.count(text)), None)


def text_before_stop(text: str, token_ids: Sequence[int], params: SamplingParams, decode: Decode) -> str:
    """``text`` of a response without the stop string that ended it, and what its last token has after that."""
    stop = completed_stop(token_ids, params, decode) if token_ids else None
    return text if stop is None or stop not in text else text[: text.rindex(stop)]
