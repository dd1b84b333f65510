"""Two examples of supervised training as they are about to be trained on: what is read, and what the loss is of."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from openppo.datasets import PreferenceExample, ProcessExample
from openppo.models.loss import IGNORE_INDEX
from openppo.tracking.terminal import announce, harmless
from openppo.trainer.token_batches import TokenMicroBatch

logger = logging.getLogger("openppo")

_EXAMPLES, _SEGMENTS, _LONGEST = 2, 6, 240
Line = tuple[str, str]
"""What a part is, and its text."""


def show_examples(micro_batch: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the first examples of a micro-batch of ``SupervisedTrainer``; of an empty one nothing."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, lines in enumerate(_examples(micro_batch, tokenizer), start=1):
        for part, text in [] if number > _EXAMPLES else lines:
            table.add_row(f"{number} {part}", Text(harmless(text, _LONGEST, keep="end" if part == "read" else "start")))
    title = Text.assemble(
        ("self-check", "bold"), ": what the first step trains on ", ("(--no_self_check leaves it out)", "dim")
    )
    if table.row_count:
        announce(Group(title, "", table, ""))


def _examples(micro_batch: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[Line]]:
    if isinstance(micro_batch, TokenMicroBatch):
        for ids, attended, trained in zip(*(tensor.tolist() for tensor in micro_batch[:3]), strict=True):
            n = sum(attended)
            yield _segments(ids[:n], [False, *trained[1:n]], tokenizer)
        return
    for example in micro_batch:
        if isinstance(example, PreferenceExample):
            yield [
                _side("chosen", example.chosen_ids, tokenizer),
                _side("rejected", example.rejected_ids, tokenizer),
            ]
        elif isinstance(example, ProcessExample):
            judged = [(i, label) for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
            places = ", ".join(f"{_shown_label(label, tokenizer)} at {i}" for i, label in judged)
            yield [("read", str(tokenizer.decode(example.token_ids))), ("judged", f"{len(judged)} steps: {places}")]


def _segments(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> list[Line]:
    """Text in turns that is only read and that is trained on; of many turns the last."""
    lines = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in group]
        text = f"{tokenizer.decode(tokens)} ({len(tokens)} tokens)"
        lines.append(("trained on" if is_trained else "read", text))
    return lines[-_SEGMENTS:]


def _side(name: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Line:
    last = tokenizer.decode(ids[-1:])
    return name, f"score at token {len(ids) - 1}, '{last}', of: {tokenizer.decode(ids)}"


def _shown_label(label: float, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"{label:.2f}" if isinstance(label, float) else str(tokenizer.decode([label]))
