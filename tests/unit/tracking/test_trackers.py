"""Trackers write what they are given, and never stop a run."""

import importlib.util
import io
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openppo.config import TrackingConfig
from openppo.tracking import (
    ConsoleTracker,
    Histogram,
    JSONLTracker,
    TensorBoardTracker,
    Tracker,
    Trackers,
    trackers,
)
from openppo.tracking.run_folder import check_run_folder, save_run
from openppo.types import SingleProcess


class Recorder(Tracker):
    """Remembers, and fails from its ``good``-th record on."""

    name = "--use_recorder"
    errors = (OSError, EOFError)

    def __init__(self, good: int = 1000, failure: Exception | None = None) -> None:
        self.good, self.closed, self.failure = good, 0, failure
        self.steps: list[int] = []

    def log(self, step: int, metrics: Any) -> None:
        if self.failure and len(self.steps) >= self.good:
            raise self.failure
        self.steps.append(step)

    log_samples = log_histograms = log

    def close(self) -> None:
        self.closed += 1


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The parsed lines, without NaN and Infinity, which Python would accept."""
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]
    ]


def test_jsonl_lines_hold_any_text_and_value_in_order(tmp_path):
    logs, before = tmp_path / "new" / "logs", time.time()
    JSONLTracker(logs).log(1, {"reward": 0.5, "kl": -0.01})
    JSONLTracker(logs).log(
        2, {"reward": math.nan, "kl": math.inf, "lr": 1e-6}
    )  # appends to an earlier run
    first, second = lines_of(logs / "metrics.jsonl")
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert list(first.items()) == [("step", 1), ("reward", 0.5), ("kl", -0.01)]
    assert second == {"step": 2, "reward": None, "kl": None, "lr": 1e-6}
    sample = {
        "prompt": "line\nbreak \u2028 \u00fc \u4f60",
        "response": "cut \ud83d",
        "score": math.nan,
        "ids": (1, 2),
    }
    JSONLTracker(logs).log_samples(3, [sample, {"path": Path("a")}])
    first, second = lines_of(logs / "samples.jsonl")
    assert first | {"time": 0} == sample | {"step": 3, "time": 0, "score": None, "ids": [1, 2]}
    assert second["path"] == "a"
    assert "\u00fc" in (logs / "samples.jsonl").read_text(encoding="utf-8")


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log(1, {"policy/loss": 0.5, "reward": 1.0})
    tracker.log(2, {"policy/loss": 0.25, "reward": math.nan})
    tracker.log_samples(2, [{"prompt": "2 + 2 =", "response": "# 4\n*so*", "score": 1.0}])
    tracker.log_histograms(
        7, {"reward": Histogram([0.0, 1.0, 3.0], [2, 1], total=3.5, total_of_squares=6.75)}
    )
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tb"), {"histograms": 0}).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
    assert math.isnan(events.Scalars("reward")[1].value)
    (text,) = events.Tensors("samples/0/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 2 and "**prompt**\n\n    2 + 2 =" in shown and "    # 4\n    *so*" in shown
    (event,) = events.Histograms("histograms/reward")
    shown = event.histogram_value
    assert [event.step, shown.num, shown.sum_squares, *shown.bucket_limit, *shown.bucket] == [
        7,
        3,
        6.75,
        1,
        3,
        2,
        1,
    ]


def test_console_prints_one_line_with_the_headline_in_its_order(capsys):
    tracker = ConsoleTracker(["reward", "kl", "absent", "length", "time/step_s"], total_steps=20)
    tracker.log(
        3, {"time/step_s": 2.149, "kl": 0.01234, "other": 1.0, "reward": 0.41, "length": 1234.5}
    )
    tracker.log(4, {"reward": math.nan})
    tracker.log(4, {"other": 1.0})
    tracker.log_samples(4, [{"prompt": "p"}])
    for step, seconds in enumerate((0.0478, 0.4567, 1.04), start=5):
        tracker.log(step, {"time/step_s": seconds})
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "step  3/20 | reward 0.41 | kl 0.0123 | length 1234 | 2.1 s",
        "step  4/20 | reward  nan",
        *("step  5/20 | 0.048 s", "step  6/20 | 0.46 s", "step  7/20 | 1.0 s"),
    ]
    assert captured.err == ""


def test_step_lines_break_between_metrics_at_80_columns(capsys):
    metrics = {
        "reward": -5.1923,
        "kl": -6.48e-07,
        "clip_fraction": 0.0312,
        "value_loss": 0.611,
        "entropy": 4.644,
    }
    metrics |= {"response_length": 186.5, "eval_reward": 0.832, "time/step_s": 12.04}
    ConsoleTracker([*metrics], total_steps=960).log(12, metrics)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step  12/960 | reward -5.19 | kl -6.48e-07 | clip_fraction 0.0312",
        "             | value_loss 0.611 | entropy 4.64 | response_length 186",
        "             | eval_reward 0.832 | 12.0 s",
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("every", "steps"),
    [(10, [1, 10, 20]), (1, [*range(1, 23)]), (0, [])],
    ids=["default", "each", "never"],
)
def test_a_sample_is_shown_at_step_1_and_every_so_many_steps(every, steps, capsys):
    tracker = ConsoleTracker([], total_steps=22, samples_every=every)
    for step in range(1, 23):
        tracker.log_samples(
            step, [{"prompt": "3 + 4?", "response": "7", "reward": 1.0, "label": "7"}]
        )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == (
        steps
        and ["  sample    of step 1, reward 1, label 7", "  prompt    3 + 4?", "  response  7"]
    )
    assert [int(line.split()[3].rstrip(",")) for line in lines if "sample" in line] == steps


def test_samples_come_every_so_many_steps_short_and_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    tracker = ConsoleTracker(["reward"], total_steps=20, samples_every=5)
    sample = {
        "prompt": "a" * 400 + "THE END",
        "response": "\x1b[2J\r\x07\u202e\n\ud83d\u4f60" + "x" * 1000,
    }
    for step in range(2, 10):
        tracker.log_samples(step, [{**sample, "reward": 0.25, "label": "\x1b]0;t\x07"}])
    tracker.log_samples(10, [])
    stream.seek(0)
    shown = stream.read()
    assert shown.count("sample") == 1 and "of step 5, reward 0.25, label \\x1b]0;t\\x07" in shown
    text = "".join(shown.split())  # lines break anywhere
    assert "\\x1b[2J\\r\\x07\\u202e\\n\\ud83d\\u4f60xx" in text
    assert "THEEND" in text and "a" * 294 not in text and "x...(+410characters)" in text
    assert max(map(len, shown.splitlines())) <= 80 + len(r"\u4f60") - 1, (
        "escaped for this stream after the layout"
    )


@pytest.mark.parametrize(
    ("failure", "what"),
    [(OSError(28, "Disk full"), "OSError: [Errno 28] Disk full"), (EOFError(), "EOFError")],
)
def test_a_failing_tracker_warns_once_and_the_others_continue(failure, what, caplog):
    bad, good = Recorder(good=1, failure=failure), Recorder()
    both = Trackers([bad, good])
    for step in range(3):
        both.log(step, {"x": 1.0})
    both.log_histograms(3, {})
    both.log_samples(4, [{"prompt": "p"}])
    for _ in range(2):
        both.close()
    assert caplog.messages == [f"--use_recorder: {what}; disabled; training continues."]
    assert (bad.steps, good.steps) == ([0], [0, 1, 2, 3, 4])
    assert (bad.closed, good.closed) == (1, 1)


def test_trackers_are_closed_also_where_a_run_fails_and_bugs_are_raised():
    recorder = Recorder(good=0, failure=KeyError("bug"))
    with pytest.raises(KeyError, match="bug"), Trackers([recorder]) as failing:
        failing.log(1, {})
    assert recorder.closed == 1


def test_rank_0_gets_all_trackers_and_the_others_none(tmp_path, capsys):
    path, options = str(tmp_path / "ckpt"), TrackingConfig(use_tensorboard=str(tmp_path / "tb"))
    other = SingleProcess()
    other.rank, other.world_size = 1, 2
    for comm in (other, SingleProcess()):
        assert list(tmp_path.iterdir()) == []
        assert capsys.readouterr().out == ""
        with trackers.make_trackers(path, options, {}, comm, ["reward"], total_steps=2) as made:
            made.log(1, {"reward": 1.0})
    assert lines_of(tmp_path / "ckpt" / "logs" / "metrics.jsonl")[0]["reward"] == 1.0
    assert len(list((tmp_path / "tb").iterdir())) == 1
    assert capsys.readouterr().out == "step 1/2 | reward 1\n"


def test_runs_that_share_a_tensorboard_folder_show_each_step_once(tmp_path):
    def start(run: str, *steps: int, resumed_after: int | None = None) -> None:
        options = TrackingConfig(use_tensorboard=str(tmp_path / "tb"))
        with trackers.make_trackers(
            str(tmp_path / run), options, {}, SingleProcess(), [], 2, resumed_after
        ) as made:
            for step in steps:
                made.log(step, {"reward": 1.0 + (resumed_after or 0)})

    start("a/ppo", 1, 2, 3, 4)
    start("b/ppo", 1)
    start("first", 1)
    time.sleep(1.1)  # event files are read in the order of the second they were begun in
    start("a/ppo", 3, 4, 5, resumed_after=2)
    start("b/ppo", 2, resumed_after=1)
    runs = {
        run.name: EventAccumulator(str(run)).Reload().Scalars("reward")
        for run in (tmp_path / "tb").iterdir()
    }
    assert {
        name: [(event.step, event.value) for event in events] for name, events in runs.items()
    } == {
        "ppo": [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0)],
        "ppo.1": [(1, 1.0), (2, 2.0)],
        "first": [(1, 1.0)],
    }


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_before_anything_is_loaded(package, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    trackers.check_trackers(TrackingConfig())
    with pytest.raises(
        ValueError,
        match=f"^--use_{package} needs the package {package}: run 'pip install {package}'",
    ):
        trackers.check_trackers(TrackingConfig(use_tensorboard="tb", use_wandb="True"))


def test_logs_that_were_removed_are_made_again(tmp_path, caplog):
    logs = tmp_path / "run" / "logs"
    save_run(logs, {"save_path": "run"}, {"python": "3"})
    tracker = JSONLTracker(logs)
    tracker.log(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        tracker.log(step, {"loss": 1.0})
    assert [
        json.loads(line)["step"] for line in (logs / "metrics.jsonl").read_text().splitlines()
    ] == [2, 3]
    assert caplog.messages == [
        f"{logs} was removed during the run: it is made again, without what was logged before"
    ]
    check_run_folder(tmp_path / "run", {})  # another run knows it
    assert (logs / "environment.json").is_file()
