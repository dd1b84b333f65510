"""What the table at the start of supervised training counts."""

import logging
from types import SimpleNamespace

import pytest

from openppo.config import TrainSFTConfig, from_options
from openppo.trainer import summary

TINY = {"train_batch_size": 4, "micro_train_batch_size": 2, "max_epochs": 2}
ONE = {"train_batch_size": 8, "micro_train_batch_size": 1}


@pytest.mark.parametrize(
    ("options", "n", "total", "done", "ranks", "said"),
    [
        (TINY, 10, 6, 0, 1, "4 samples, in 2 micro-batches of up to 2|2 epochs of 10 samples, 6 steps"),
        (TINY, 10, 5, 3, 1, "2 epochs of 10 samples, 6 steps; --max_steps ends it after 5|after step 3 of 5"),
        (ONE, 3, 1, 0, 2, "3 samples, in 2 micro-batches of up to 1 on each of 2 ranks|1 epoch of 3 samples, 1 step"),
    ],
)
def test_the_table_counts_small_last_steps_max_steps_and_ranks(
    options, n, total, done, ranks, said, caplog, monkeypatch
):
    monkeypatch.setattr(summary, "model_role", lambda *_, **__: ("model", "m"))
    parts = SimpleNamespace(strategy=SimpleNamespace(is_main=True), train_examples=[None] * n, eval_examples=[])
    parts.model, comm = SimpleNamespace(module=None), SimpleNamespace(world_size=ranks)
    config = from_options(TrainSFTConfig, pretrain="m", dataset="d", **options)
    trainer = SimpleNamespace(components=parts, config=config, comm=comm, total_steps=total, global_step=done)
    with caplog.at_level(logging.INFO, logger="openppo"):
        summary.log_supervised_start(trainer)
    lines = [line.rstrip() for line in caplog.text.splitlines()]
    assert all(any(line.endswith(f"  {each}") for line in lines) for each in said.split("|")), lines
    assert ("resumes" in caplog.text) is (done > 0)
