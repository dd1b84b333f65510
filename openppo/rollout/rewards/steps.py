"""Where the steps of a response end, in tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def step_ends(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Index, within ``response_ids``, of the last token of each step, in order.

    Steps are what ``separator`` splits the response's text into (special tokens left out), without those that are
    blank. A step's last token is the one that completes its text, separator and blanks at the end not counted. Places
    are found by decoding: a token may hold the end of a step and the separator too, or even two steps, and a character
    may need several tokens.
    """
    ids = list(response_ids)

    def text_of(n_tokens: int) -> str:
        return str(tokenizer.decode(ids[:n_tokens], skip_special_tokens=True))

    text = text_of(len(ids))
    ends: list[int] = []
    n_tokens = start = 0
    for piece in text.split(separator):
        if piece.strip():
            until_here = text[: start + len(piece.rstrip())]
            n_tokens = bisect_left(
                range(len(ids) + 1), True, lo=n_tokens, key=lambda n: text_of(n).startswith(until_here)
            )
            ends.append(n_tokens - 1)
        start += len(piece) + len(separator)
    return ends
