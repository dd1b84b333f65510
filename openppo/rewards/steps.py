"""Where the steps of a response end, in tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from openppo.types import Score, Trajectory

_MOST_BYTES = 4
"""Of one character in UTF-8."""


def step_tokens(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Index in ``token_ids`` of the last token of each step, in order; a step lies within one span of actions."""
    return [
        start + end
        for start, stop in trajectory.spans
        for end in step_ends(trajectory.token_ids[start:stop], tokenizer, separator)
    ]


def score_of_steps(trajectory: Trajectory, ends: Sequence[int], rewards: Sequence[float]) -> Score:
    """Score with ``rewards`` of steps at the tokens ``ends`` of the trajectory."""
    token_rewards, step_ends = [0.0] * len(trajectory.token_ids), [False] * len(trajectory.token_ids)
    for end, reward in zip(ends, rewards, strict=True):
        token_rewards[end] += reward
        step_ends[end] = True
    return Score(token_rewards=token_rewards, step_ends=step_ends)


def step_ends(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Index, within ``response_ids``, of the last token of each step, in order.

    Steps are the parts of the response's text (special tokens left out) between ``separator``, blank ones left out. A
    step's last token is the one that completes its text, separator and blanks at the end not counted. Places are found
    by decoding: a token may hold the end of a step and the separator, or two steps; a character may take several.
    """
    ids = list(response_ids)

    def decode(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], skip_special_tokens=True))

    first, text = 0, decode(0, len(ids))  # the text of ids[first:], and where in it the next piece begins
    place = 0
    ends: list[int] = []
    for piece in text.split(separator):
        if piece.strip():
            until_here = text[: max(0, place + len(piece.rstrip()))]
            stop = _end(until_here, decode, first, len(ids))
            ends.append(stop - 1)
            rest = decode(stop, len(ids))
            if text.endswith(rest):  # not within a character: text after it need not be decoded again
                place -= len(text) - len(rest)
                first, text = stop, rest
        place += len(piece) + len(separator)
    return ends


def _end(text: str, decode: Callable[[int, int], str], first: int, last: int) -> int:
    """The smallest ``stop`` in ``first..last`` for which the tokens ``first..stop`` begin with ``text``.

    Larger ones do so too, except for tokens of single bytes: some tokenizers decode a run of them to replacement
    characters until its last character is whole, so that up to three in a row may not.
    """

    def is_complete(stop: int) -> bool:
        return decode(first, stop).startswith(text)

    found = bisect_left(range(last + 1), True, lo=first, key=is_complete)
    while earlier := [stop for stop in range(max(first, found - _MOST_BYTES), found) if is_complete(stop)]:
        found = earlier[0]
    return found
