"""When --stop_when ends a run, told by hand-made metrics."""

import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config.run import parse_condition
from openppo.trainer.callbacks import StopConditions, StopWhen, check_conditions

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def conditions(*texts: str) -> list[Any]:
    return [parse_condition(text, "--stop_when") for text in texts]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("kl > 0.2", {0.2: False, 0.21: True}),
        ("kl>=2e-1", {0.2: True, 0.19: False}),
        (" kl <-1 ", {-1.0: False, -1.1: True, math.nan: False}),
        ("kl<= -1", {-1.0: True, math.inf: False}),
    ],
)
def test_a_condition_compares_as_it_reads(text: str, values: dict[float, bool]) -> None:
    (condition,) = conditions(text)
    assert {value: condition.holds({"kl": value}) for value in values} == values
    assert not condition.holds({"kl_k3": 9.0, "other": -9.0})


@pytest.mark.parametrize("metric", ["eval/my data/pass@1", "reward/correct", "time/step_s"])
def test_any_name_of_a_metric_may_stand_there(metric: str) -> None:
    (condition,) = conditions(f"{metric} > 0")
    check_conditions([condition])
    assert condition.holds({metric: 1.0})


def test_every_documented_metric_may_end_a_run() -> None:
    section = DOCUMENT.split("\n## Rewards")[1].split("\n## samples.jsonl")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    names = [re.sub(r"<\w+>", "1", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 50
    check_conditions(conditions(*(f"{name} > 0" for name in names)))


def test_a_metric_that_no_run_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="--stop_when 'eval_rewards > 1': .*did you mean eval_reward"):
        check_conditions(conditions("kl > 1", "eval_rewards > 1"))


def test_the_first_condition_that_holds_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openppo")
    callback, trainer = StopWhen(conditions("kl > 0.2", "eval_reward > 0.9")), SimpleNamespace(global_step=0)
    trainer.should_stop = False
    any_trainer: Any = trainer
    callback.on_evaluate(any_trainer, {"eval_reward": 0.5, "kl": 1.0})
    callback.on_step_end(any_trainer, {"kl": 0.1, "eval_reward": 1.0})  # which on_evaluate has seen
    callback.on_step_end(any_trainer, {"reward": 0.1})
    assert not trainer.should_stop
    assert "--stop_when kl > 0.2: no such metric yet among reward" in caplog.text
    trainer.global_step = 7
    callback.on_evaluate(any_trainer, {"eval_reward": 0.95})
    assert trainer.should_stop
    assert "--stop_when eval_reward > 0.9: eval_reward is 0.95 at step 7; the run ends" in caplog.text


@pytest.mark.parametrize(("texts", "goes_on"), [(("kl > 0.2",), False), (("kl > 0.4",), True)])
def test_a_run_that_had_stopped_goes_on_under_another_condition(texts: tuple[str, ...], goes_on: bool) -> None:
    trainer: Any = SimpleNamespace(global_step=3, should_stop=False)
    first, second = StopWhen(conditions("kl > 0.2")), StopWhen(conditions(*texts))
    first.on_step_end(trainer, {"kl": 0.3})
    second.load_state_dict(first.state_dict())
    second.on_fit_start(trainer)
    assert trainer.should_stop is not goes_on


def test_supervised_training_looks_at_all_metrics_of_a_step() -> None:
    stopping = StopConditions(conditions("eval_loss < 1", "loss < 0.5"))
    assert stopping.first_true({"loss": 0.6}, 1) is None
    assert stopping.first_true({"loss": 0.6, "eval_loss": 0.9}, 2) == "eval_loss < 1"
    assert stopping.first_true({"loss": 0.4, "eval_loss": 2.0}, 3) == "loss < 0.5"
