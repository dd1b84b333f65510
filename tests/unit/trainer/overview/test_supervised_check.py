"""What supervised training shows of its first examples."""

from __future__ import annotations

import logging

import pytest
import torch

from openppo.datasets import PreferenceExample, ProcessExample
from openppo.models.loss import IGNORE_INDEX
from openppo.trainer.overview.supervised_check import show_examples
from openppo.trainer.token_batches import TokenMicroBatch


class Letters:
    """A tokenizer of letters; number 26 is an escape."""

    def decode(self, ids: list[int]) -> str:
        return "".join("\x1b" if i == 26 else chr(ord("a") + i) for i in ids)


def shown(micro_batch: object, caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Words of the lines below the title."""
    with caplog.at_level(logging.INFO, logger="openppo"):
        show_examples(micro_batch, Letters())  # type: ignore[arg-type]
    return [line.split() for line in caplog.text.splitlines()[2:] if line.strip()]


def test_turns_that_are_read_and_trained_on_are_told_apart_and_padding_is_no_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first token of a row is no target whatever its mask says."""
    sequences = torch.tensor([[0, 1, 2, 3, 26, 5], [6, 7, 8, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1] * 6]).bool()
    trained = torch.tensor([[0, 0, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0], [1] * 6]).bool()
    assert shown(TokenMicroBatch(sequences, attention, trained), caplog) == [
        ["1", "read", "ab", "(2", "tokens)"],
        ["1", "trained", "on", "c", "(1", "tokens)"],
        ["1", "read", "d", "(1", "tokens)"],
        ["1", "trained", "on", "\\x1bf", "(2", "tokens)"],
        ["2", "read", "g", "(1", "tokens)"],
        ["2", "trained", "on", "hi", "(2", "tokens)"],
    ]


def test_pairs_say_where_their_scores_are_read(caplog: pytest.LogCaptureFixture) -> None:
    (chosen, rejected) = shown([PreferenceExample([0, 1, 2], [0, 3], 0.0)], caplog)
    assert chosen == "1 chosen score at token 2, 'c', of: abc".split()
    assert rejected == "1 rejected score at token 1, 'd', of: ad".split()


def test_steps_say_how_they_are_judged(caplog: pytest.LogCaptureFixture) -> None:
    labels: list[int] = [IGNORE_INDEX, 7, IGNORE_INDEX, 8]
    (read, judged) = shown([ProcessExample([0, 1, 2, 1], labels)], caplog)
    assert read == ["1", "read", "abcb"]
    assert judged == "1 judged 2 steps: h at 1, i at 3".split()


def test_a_rank_without_examples_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert shown([], caplog) == []
