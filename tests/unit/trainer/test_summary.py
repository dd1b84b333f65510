"""What the table at the start of supervised training counts."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config import TrainSFTConfig, from_options
from openppo.trainer import summary


def lines(
    caplog: pytest.LogCaptureFixture, n: int, total_steps: int, done: int = 0, ranks: int = 1, **options: Any
) -> dict[str, str]:
    """The facts below the table of roles, by name."""
    config = from_options(TrainSFTConfig, pretrain="m", dataset="d", **options)
    parts = SimpleNamespace(
        strategy=SimpleNamespace(is_main=True),
        train_examples=[None] * n,
        eval_examples=[],
        model=SimpleNamespace(module=None),
        estimate=None,
    )
    comm = SimpleNamespace(world_size=ranks)
    trainer: Any = SimpleNamespace(
        components=parts, config=config, comm=comm, total_steps=total_steps, global_step=done
    )
    with caplog.at_level(logging.INFO, logger="openppo"):
        summary.log_supervised_start(trainer)
    names = ("each step", "in all", "resumes")
    found = (line.strip() for line in caplog.text.splitlines())
    return {name: line[len(name) :].strip() for line in found for name in names if line.startswith(name)}


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of roles is tested elsewhere."""
    monkeypatch.setattr(summary, "model_role", lambda *_, **__: summary.Role("model", "m"))


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        (
            {"n": 10, "total_steps": 6},
            {"train_batch_size": 4, "micro_train_batch_size": 2, "max_epochs": 2},
            {"each step": "4 samples, in 2 micro-batches of up to 2", "in all": "2 epochs of 10 samples, 6 steps"},
        ),
        (
            {"n": 10, "total_steps": 5, "done": 3},
            {"train_batch_size": 4, "max_epochs": 2, "max_steps": 5},
            {
                "each step": "4 samples, in 1 micro-batch of up to 4",
                "in all": "2 epochs of 10 samples, 6 steps; --max_steps ends it after 5",
                "resumes": "after step 3 of 5",
            },
        ),
        (
            {"n": 3, "total_steps": 1, "ranks": 2},
            {"train_batch_size": 8, "micro_train_batch_size": 1},
            {
                "each step": "3 samples, in 2 micro-batches of up to 1 on each of 2 ranks",
                "in all": "1 epoch of 3 samples, 1 step",
            },
        ),
    ],
)
def test_the_table_counts_small_last_steps_max_steps_and_ranks(
    caplog: pytest.LogCaptureFixture, run: dict[str, int], options: dict[str, int], said: dict[str, str]
) -> None:
    assert lines(caplog, **run, **options) == said
