"""What supervised training shares: the data it reads, and what is left of a run that ends early."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config import BatchConfig, RunConfig, SupervisedConfig, TrainSFTConfig
from openppo.datasets import ShowRows, SourceRow
from openppo.tracking import Trackers
from openppo.tracking.phase import current
from openppo.trainer.supervised.build import load_train_and_eval
from openppo.trainer.supervised.loop import SupervisedComponents, SupervisedTrainer
from openppo.types import SingleProcess
from tests.unit.trainer.conftest import Record, StopIn, Strategy


class Trainer(SupervisedTrainer[int]):
    """Ends with ``ZeroDivisionError`` in its third step."""

    def make_batch(self, examples: Sequence[int]) -> Any: ...

    def loss(self, *_: Any) -> Any: ...

    def step(self, examples: Sequence[int]) -> dict[str, float]:
        self.global_step += 1
        return {"loss": 1 / (3 - self.global_step)}


def fitted(record: Record, **run: Any) -> Trainer:
    """A trainer without a model, and of ten steps."""
    strategy = Strategy(save_pretrained=lambda *_: record.saved.append("model"))
    model = SimpleNamespace(module=SimpleNamespace(model=None))
    components: Any = SupervisedComponents(strategy, None, model, [1] * 10, [], Trackers([record]), record)  # type: ignore[arg-type]
    config = TrainSFTConfig(SupervisedConfig("model", "data"), batch=BatchConfig(1), run=RunConfig(**run))
    return Trainer(config, components)


def test_a_failed_run_closes_its_trackers_and_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        fitted(record := Record()).fit()
    assert ([step for step, _ in record.logged], record.saved, record.closed) == ([1, 2], [], 1)


def test_a_condition_ends_the_run_with_its_model_saved_and_still_holds_when_it_resumes() -> None:
    options = {"stop_when": ("grad_norm > 9", "loss >= 1"), "logging_steps": 100}
    fitted(record := Record(), **options).fit()  # losses 1/2, 1, then an error
    (step, state, _), model = record.saved
    assert (record.logged, step, model, record.closed) == ([(2, {"loss": 1.0})], 2, "model", 1)
    for given, raises in ((options, nullcontext()), ({}, pytest.raises(ZeroDivisionError))):
        again = fitted(record := Record(), **given)
        again.components.checkpointer.load = lambda: state  # type: ignore[method-assign]
        again.load_checkpoint()
        with raises:
            again.fit()
        assert (again.global_step, record.saved) == ((2, ["model"]) if given else (3, []))


def test_a_signal_lets_the_step_finish() -> None:
    """It arrives in the first step; the report of that step comes before the checkpoint."""
    trainer = fitted(record := Record())
    trainer.components.stop = StopIn(2)
    trainer.fit()
    [(step, state, was_closed)] = record.saved
    assert ([step for step, _ in record.logged], step, state["global_step"], was_closed) == ([1], 1, 1, False)


def test_only_training_rows_are_mixed_and_each_row_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n in (("a", 40), ("b", 20)):
        rows = [{"text": f"{name}{i}"} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources, seen = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", []
    monkeypatch.setattr(current, "on_progress", lambda: seen.append(None))

    def texts(rows: list[SourceRow], show: ShowRows) -> list[str]:
        return [row.row["text"] for row in show(rows)]

    config = TrainSFTConfig(SupervisedConfig("model", sources, dataset_probs="3,1", eval_dataset=sources))
    train, held_out = load_train_and_eval(config, SingleProcess(), texts)
    assert held_out == [f"a{i}" for i in range(40)] + [f"b{i}" for i in range(20)]
    assert len(train) < 60 and train[:40] != held_out[:40]
    assert len(seen) == len(train) + 60, "the watchdog ends a rank without progress"
