"""The loop that supervised training shares: what is left of its logs when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config import BatchConfig, RunConfig, SupervisedConfig, TrainSFTConfig
from openppo.tracking import Trackers
from openppo.trainer.supervised.loop import SupervisedTrainer
from openppo.types import SingleProcess


class Trainer(SupervisedTrainer[int]):
    """Ends with ``ZeroDivisionError`` in its third step."""

    def make_batch(self, examples: Sequence[int]) -> Any: ...

    def loss(self, *_: Any) -> Any: ...

    def step(self, examples: Sequence[int]) -> dict[str, float]:
        self.global_step += 1
        return {"loss": 1 / (3 - self.global_step)}


def test_a_run_that_fails_closes_its_trackers_and_raises_what_ended_it() -> None:
    calls: list[Any] = []
    tracker: Any = SimpleNamespace(
        errors=(OSError,), log=lambda step, metrics: calls.append(step), close=lambda: calls.append("closed")
    )
    strategy = SimpleNamespace(comm=SingleProcess(), device="cpu", is_main=True)
    parts: Any = SimpleNamespace(
        strategy=strategy, train_examples=[1] * 10, eval_examples=[], trackers=Trackers([tracker]), checkpointer=None
    )
    trainer = Trainer(TrainSFTConfig(SupervisedConfig("model", "data"), batch=BatchConfig(1)), parts)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert calls == [1, 2, "closed"]


def test_a_condition_on_a_metric_ends_the_run_with_its_model_saved() -> None:
    calls: list[Any] = []
    tracker: Any = SimpleNamespace(errors=(OSError,), log=lambda step, metrics: calls.append(step), close=lambda: None)
    strategy = SimpleNamespace(
        comm=SingleProcess(), device="cpu", is_main=True, save_pretrained=lambda *_: calls.append("saved")
    )
    engine = SimpleNamespace(module=SimpleNamespace(model=None))
    parts: Any = SimpleNamespace(
        strategy=strategy,
        train_examples=[1] * 10,
        eval_examples=[],
        trackers=Trackers([tracker]),
        checkpointer=None,
        engine=engine,
        tokenizer=None,
    )
    run = RunConfig(stop_when=("grad_norm > 9", "loss >= 1"), logging_steps=100)
    trainer = Trainer(TrainSFTConfig(SupervisedConfig("model", "data"), batch=BatchConfig(1), run=run), parts)
    trainer.fit()  # losses 1/2, 1, then an error
    assert calls == [2, "saved"]
