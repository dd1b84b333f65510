"""When EarlyStopping stops, told by hand-made curves."""

import inspect
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.trainer.callbacks import Callback, EarlyStopping


def stopped_after(callback: EarlyStopping, curve: list[float], hook: str = "on_evaluate") -> int | None:
    """The number of the report at which ``callback`` asks for the end; None if it never does."""
    trainer: Any = SimpleNamespace(should_stop=False)
    for number, value in enumerate(curve, start=1):
        getattr(callback, hook)(trainer, {callback.metric: value, "other": -value})
        if trainer.should_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("curve", "patience", "mode", "min_delta", "expected"),
    [
        ([1, 2, 3, 4], 1, "max", 0, None),
        ([1, 2, 2, 3], 1, "max", 0, 3),  # no better is no improvement
        ([1, 2, 2, 3, 3, 3], 2, "max", 0, 6),
        ([3, 1, 2, 2.9, 4], 3, "max", 0, 4),  # better than before is not better than best
        ([4, 3, 2, 2, 2], 2, "min", 0, 5),
        ([1, 1.4, 1.8, 2.1], 2, "max", 0.5, None),  # small steps count once they add up
        ([1, 1.4, 1.5, 2.1], 2, "max", 0.5, 3),
        ([1, math.nan, math.nan], 2, "max", 0, 3),
        ([math.nan, math.nan, 1], 3, "min", 0, None),
    ],
)
def test_it_stops_after_so_many_reports_without_a_gain(
    curve: list[float], patience: int, mode: Any, min_delta: float, expected: int | None
) -> None:
    assert stopped_after(EarlyStopping("eval_reward", patience, mode, min_delta), curve) == expected


def test_it_looks_where_its_metric_is_reported() -> None:
    assert stopped_after(EarlyStopping("reward", 1), [1, 1], "on_step_end") == 2
    assert stopped_after(EarlyStopping("reward", 1), [1, 1], "on_evaluate") is None
    assert stopped_after(EarlyStopping("eval/gsm8k/pass@1", 1), [1, 1], "on_step_end") is None
    assert stopped_after(EarlyStopping("eval/gsm8k/pass@1", 1), [1, 1], "on_evaluate") == 2


def test_it_says_once_that_a_metric_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    stopping, trainer = EarlyStopping("rewrad", 1), SimpleNamespace(should_stop=False)
    with caplog.at_level(logging.WARNING, "openppo"):
        for _ in range(3):
            stopping.on_step_end(trainer, {"reward": 1.0, "kl": 0.1})  # type: ignore[arg-type]
    assert not trainer.should_stop
    [record] = caplog.records
    assert record.getMessage() == "EarlyStopping: no metric rewrad yet among reward, kl"


@pytest.mark.parametrize(
    "arguments", [{"patience": 0}, {"patience": 1, "mode": "up"}, {"patience": 1, "min_delta": -1}]
)
def test_arguments_that_make_no_sense_are_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="patience of at least 1, mode 'max' or 'min', and min_delta"):
        EarlyStopping("reward", **arguments)


def test_a_callback_without_methods_of_its_own_does_nothing() -> None:
    hooks = {name: hook for name, hook in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")}
    assert set(hooks) == {"on_fit_start", "on_step_end", "on_evaluate", "on_save", "on_fit_end"}
    for name, hook in hooks.items():
        nothing = [None] * (len(inspect.signature(hook).parameters) - 1)
        assert getattr(Callback(), name)(*nothing) is None
