"""Self-check of supervised training: two examples as text."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets import PreferenceExample, ProcessExample, RankingExample, TokenExample
from openppo.models.supervised_loss import IGNORE_INDEX
from openppo.tracking.console import escape_control, log_lines, table_lines
from openppo.trainer.self_check import HINT, LONGEST, N_SHOWN

_SEGMENTS = 6
"""Turns of reading and training in the log, the last ones."""

Parts = list[tuple[str, str]]
"""Names and texts of the parts of an example."""


def show_examples(examples: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the first ``examples`` of a step: texts that are read, and targets."""
    rows = []
    for number, example in enumerate(examples[:N_SHOWN], start=1):
        for name, text in _parts(example, tokenizer):
            keep = "end" if name == "read" else "start"
            rows.append((f"{number} {name}", escape_control(text, LONGEST, keep=keep)))
    log_lines([f"self-check: what the first step trains on {HINT}", "", *table_lines(rows), ""])


def _parts(example: Any, tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Names and texts of an example's parts."""
    if isinstance(example, PreferenceExample | RankingExample):
        return _ranked_texts(example, tokenizer)
    if isinstance(example, ProcessExample):
        return _judged_steps(example, tokenizer)
    return _turns(example, tokenizer)


def _ranked_texts(
    example: PreferenceExample | RankingExample, tokenizer: PreTrainedTokenizerBase
) -> Parts:
    """Texts of a pair or a ranking, with the place of their score."""
    names = ["chosen", "rejected"]
    if isinstance(example, RankingExample):
        names = [f"ranked {score:g}" for score in example.scores]
    parts = []
    for name, ids in zip(names, example.texts, strict=True):
        parts.append((name, f"score at token {len(ids) - 1} of: {tokenizer.decode(ids)}"))
    return parts


def _judged_steps(example: ProcessExample, tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Text of a solution, and labels of its steps with their places."""
    steps = []
    for place, label in enumerate(example.labels):
        if label == IGNORE_INDEX:
            continue
        name = f"{label:.2f}" if isinstance(label, float) else tokenizer.decode([label])
        steps.append(f"{name} at {place}")
    return [
        ("read", str(tokenizer.decode(example.token_ids))),
        ("judged", f"{len(steps)} steps: {', '.join(steps)}"),
    ]


def _turns(example: TokenExample, tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Last turns of reading and training in a row of tokens."""
    is_target = (False, *example.loss_mask[1:])
    turns = []
    for target, tokens in groupby(
        zip(is_target, example.token_ids, strict=True), key=itemgetter(0)
    ):
        turns.append((target, [token_id for _, token_id in tokens]))

    parts = []
    for target, ids in turns[-_SEGMENTS:]:
        name = "trained on" if target else "read"
        parts.append((name, f"{tokenizer.decode(ids)} ({len(ids)} tokens)"))
    return parts
