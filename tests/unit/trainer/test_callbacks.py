"""When callbacks and --stop_when end a run, told by hand-made metrics; and which callback gets which state back."""

import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from openppo.config import RunConfig
from openppo.trainer.callbacks import (
    Callback,
    EarlyStopping,
    StopWhen,
    check_metric,
    restore_callbacks,
)
from openppo.trainer.step_end import reporting

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def conditions(*texts):
    return RunConfig(stop_when=texts).stop_conditions


def stopped_after(callback, curve):
    """The number of the report at which ``callback`` asks for the end; None if it never does."""
    trainer = SimpleNamespace(should_stop=False, global_step=0)
    for value in curve:
        metrics = {callback.metric: value, "other": -value}
        trainer.global_step += 1
        callback.on_evaluate(trainer, metrics)  # they come again, with those of the step
        callback.on_step_end(trainer, metrics)
        callback.on_step_end(trainer, {"other": value})
        if trainer.should_stop:
            return trainer.global_step
    return None


@pytest.mark.parametrize(
    ("curve", "patience", "mode", "min_delta", "expected"),
    [
        ([1, 2, 3, 4], 1, "max", 0, None),
        ([1, 2, 2, 3, 3, 3], 2, "max", 0, 6),  # no better is no improvement
        ([3, 1, 2, 2.9, 4], 3, "max", 0, 4),  # better than before is not better than best
        ([4, 3, 2, 2, 2], 2, "min", 0, 5),
        ([1, 1.4, 1.8, 2.1], 2, "max", 0.5, None),  # small steps count once they add up
        ([1, 1.4, 1.5, 2.1], 2, "max", 0.5, 3),
        ([1, math.nan, math.nan], 2, "max", 0, 3),
        ([math.nan, math.nan, 1], 3, "min", 0, None),
    ],
)
def test_early_stopping_ends_after_patience_reports_without_gain(
    curve, patience, mode, min_delta, expected
):
    assert stopped_after(EarlyStopping("eval_reward", patience, mode, min_delta), curve) == expected


def test_a_users_callback_sees_the_evaluation_and_comes_before_log_and_checkpoint():
    mine = Callback()
    names = [type(callback).__name__ for callback in reporting([mine])]
    assert names[:3] == ["ShowSamples", "Evaluate", "KeepBest"]
    assert reporting([mine])[3] is mine
    assert names[4:] == ["AgreeOnStopping", "Log", "SaveCheckpoint"]


def test_early_stopping_refuses_arguments_that_cannot_work():
    for arguments, message in (
        (("reward", 0), "needs patience of at least 1, .*; got 0, 'max', 0.0"),
        (("reward", 1, "up"), "mode 'max' or 'min'.*; got 1, 'up', 0.0"),
        (("reward", 1, "max", -1), "min_delta of at least 0; got 1, 'max', -1"),
        (("rewrad", 1), "EarlyStopping: there is no metric rewrad; did you mean reward"),
    ):
        with pytest.raises(ValueError, match=message):
            EarlyStopping(*arguments)


def test_a_condition_compares_as_it_reads():
    for text, values in {
        "kl > 0.2": {0.2: False, 0.21: True},
        "kl>=2e-1": {0.2: True, 0.19: False},
        " kl <-1 ": {-1.0: False, -1.1: True, math.nan: False},
        "kl<= -1": {-1.0: True, math.inf: False},
    }.items():
        (condition,) = conditions(text)
        assert {value: condition.holds({"kl": value}) for value in values} == values, text
        assert not condition.holds({"kl_k3": 9.0, "other": -9.0})


def test_every_documented_metric_may_end_a_run():
    section = DOCUMENT.split("\n## Progress")[1].split("\n## Dumped rollouts")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    names = [re.sub(r"<\w+>", "1", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 50
    for name in [*names, "eval/my data/pass@1"]:
        check_metric(name, "--stop_when")
    with pytest.raises(
        ValueError, match="--stop_when: there is no metric eval_rewards; did you mean eval_reward"
    ):
        check_metric("eval_rewards", "--stop_when")


def test_the_first_condition_that_holds_ends_the_run(caplog):
    caplog.set_level(logging.INFO, "openppo")
    callback, trainer = (
        StopWhen(conditions("kl > 0.2", "eval_reward > 0.9")),
        SimpleNamespace(should_stop=False),
    )
    for trainer.global_step, metrics in enumerate(
        [{"kl": 0.1, "eval_reward": 0.9}, {"reward": 0.1}], start=1
    ):
        callback.on_step_end(trainer, metrics)
    assert not trainer.should_stop
    assert caplog.text.count("no such metric yet") == 1
    assert "--stop_when kl > 0.2: no such metric yet among reward" in caplog.text
    callback.on_step_end(trainer, {"kl": 0.1, "eval_reward": 0.95})
    assert trainer.should_stop
    assert (
        "--stop_when eval_reward > 0.9: eval_reward is 0.95 at step 2; the run ends" in caplog.text
    )


class First(Callback):
    """Remembers what it was given."""

    state = None

    def load_state_dict(self, state):
        self.state = state


class Second(First):
    """Another one."""


def test_a_callback_resumes_from_the_state_of_its_class(caplog):
    saved = [{"class": name, "state": i} for i, name in enumerate(["First", "Second", "First"])]
    for classes, numbers in (
        ([First, Second, First], [0, 1, 2]),
        ([Second, First, First], [1, 0, 2]),
        ([Second], [1]),
        ([First, First, First], [0, 2, None]),
    ):
        caplog.clear()
        callbacks = [each() for each in classes]
        same = restore_callbacks(callbacks, saved)
        assert [callback.state for callback in callbacks] == numbers
        assert same is (classes == [First, Second, First])
        assert ("callbacks were First, Second, First and are" in caplog.text) is not same
