"""Trackers write what they are given, and never stop a run."""

import importlib.util
import io
import json
import math
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
    check_trackers,
    make_trackers,
)
from openppo.types import SingleProcess


class Rank1(SingleProcess):
    """``Comm`` of the second of two ranks."""

    rank = 1
    world_size = 2


class LostConnectionError(Exception):
    """An error of the library of a tracker."""


class Recorder(Tracker):
    """Remembers, and fails from its ``good``-th record on."""

    name = "--use_recorder"
    errors = (OSError, LostConnectionError)

    def __init__(self, good: int = 1000, failure: Exception | None = None, at_close: Exception | None = None) -> None:
        self.good, self.closed, self.at_close = good, 0, at_close
        self.failure = failure or OSError(28, "No space left on device")
        self.records: list[tuple[int, Any]] = []

    def log(self, step: int, metrics: Any) -> None:
        if len(self.records) >= self.good:
            raise self.failure
        self.records.append((step, metrics))

    log_samples = log_histograms = log

    def close(self) -> None:
        if self.at_close is not None:
            raise self.at_close
        self.closed += 1


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The parsed lines, without NaN and Infinity, which Python would accept."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_jsonl_lines_hold_step_time_and_metrics_in_order(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    before = time.time()
    JSONLTracker(logs).log(1, {"reward": 0.5, "kl": -0.01})
    JSONLTracker(logs).log(2, {"reward": math.nan, "kl": math.inf, "lr": 1e-6})  # appends to an earlier run
    first, second = lines_of(logs / "metrics.jsonl")
    assert list(first) == ["step", "time", "reward", "kl"]
    assert (first["step"], first["reward"], first["kl"]) == (1, 0.5, -0.01)
    assert before <= first["time"] <= time.time()
    assert (second["step"], second["reward"], second["kl"], second["lr"]) == (2, None, None, 1e-6)
    with pytest.raises(AssertionError, match="step"):
        JSONLTracker(tmp_path).log(1, {"step": 3.0})


def test_jsonl_samples_keep_any_text_and_any_value(tmp_path: Path) -> None:
    sample = {"prompt": "line\nbreak \u2028 \u00fc \u4f60", "response": "cut \ud83d", "score": math.nan, "ids": (1, 2)}
    JSONLTracker(tmp_path).log_samples(3, [sample, {"path": Path("a")}])
    first, second = lines_of(tmp_path / "samples.jsonl")
    assert (first["prompt"], first["response"]) == (sample["prompt"], sample["response"])
    assert (first["step"], first["score"], first["ids"], second["path"]) == (3, None, [1, 2], "a")
    assert "\u00fc" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log(1, {"policy/loss": 0.5, "reward": 1.0})
    tracker.log(2, {"policy/loss": 0.25, "reward": math.nan})
    tracker.log_samples(2, [{"prompt": "2 + 2 =", "response": "# 4\n*so*", "score": 1.0}])
    tracker.log_histograms(7, {"reward": Histogram([0.0, 1.0, 2.0, 3.0], [2, 0, 1], total=3.5, total_of_squares=6.75)})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tb"), {"histograms": 0}).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 0.5), (2, 0.25)]
    assert math.isnan(events.Scalars("reward")[1].value)
    (text,) = events.Tensors("samples/0/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 2
    assert "**prompt**\n\n    2 + 2 =" in shown
    assert "    # 4\n    *so*" in shown
    (event,) = events.Histograms("histograms/reward")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (7, 0, 3, 3, 3.5, 6.75)
    bins = dict(zip(value.bucket_limit, value.bucket, strict=True))
    assert (bins[1.0], bins[2.0], bins[3.0]) == (2.0, 0.0, 1.0)


def test_after_a_resume_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    for resumed_after, steps, reward in ((None, (1, 2, 3, 4), 1.0), (2, (3, 4, 5), 2.0)):
        tracker = TensorBoardTracker(tmp_path / "tb", resumed_after)
        for step in steps:
            tracker.log(step, {"reward": reward})
        tracker.close()
        time.sleep(1.1)  # event files are read in the order of the second they were begun in
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_tensorboard_is_imported_only_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    make_trackers(str(tmp_path), TrackingConfig(), {}, SingleProcess(), [], total_steps=1).close()
    with pytest.raises(ValueError, match=r"--use_tensorboard.*pip install tensorboard"):
        TensorBoardTracker(tmp_path)


def test_console_prints_one_line_with_the_headline_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTracker(["reward", "kl", "absent", "length", "time/step_s"], total_steps=20)
    tracker.log(3, {"time/step_s": 2.149, "kl": 0.01234, "other": 1.0, "reward": 0.41, "length": 1234.5})
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


def test_samples_come_every_so_many_steps_short_and_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTracker(["reward"], total_steps=20, samples_every=5)
    bad = "clear \x1b[2J the\r screen\x07 \u202eodd\u202c \x9b31m\nnext line \ud83d"
    samples = [{"prompt": "a" * 400 + "THE END", "response": bad + "x" * 1000, "reward": 0.25, "label": "\x1b]0;t\x07"}]
    for step in range(1, 10):
        tracker.log_samples(step, samples)
    tracker.log_samples(10, [])
    shown = capsys.readouterr().out
    assert shown.count("sample") == 1
    assert "of step 5, reward 0.25, label \\x1b]0;t\\x07" in shown
    assert all(character == "\n" or (character.isprintable() and character.isascii()) for character in shown)
    text = "".join(shown.split())  # lines break anywhere
    assert "clear\\x1b[2Jthe\\rscreen\\x07\\u202eodd\\u202c\\x9b31m\\nnextline\\ud83d" in text
    assert "THEEND" in text and "a" * 294 not in text
    assert f"...(+{len(bad) + 1000 - 600}characters)" in text
    assert max(map(len, shown.splitlines())) <= 110


def test_a_stream_that_cannot_encode_a_sample_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    ConsoleTracker(["reward"], 20, samples_every=1).log_samples(1, [{"prompt": "\u4f60", "response": "\u00fc"}])
    stream.seek(0)
    assert "\\u4f60" in (shown := stream.read())
    assert "\\xfc" in shown


@pytest.mark.parametrize("failure", [None, LostConnectionError("gone"), ConnectionResetError()])
def test_a_failing_tracker_warns_once_and_the_others_continue(
    failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder(good=1, failure=failure), Recorder()
    trackers = Trackers([bad, good])
    for step in range(3):
        trackers.log(step, {"x": 1.0})
    trackers.log_histograms(3, {})
    trackers.log_samples(4, [{"prompt": "p"}])
    for _ in range(2):
        trackers.close()
    (message,) = caplog.messages
    what = "OSError: [Errno 28] No space left on device" if failure is None else type(failure).__name__
    assert message.startswith(f"--use_recorder: {what}")
    assert message.endswith("; disabled; training continues.")
    assert ([step for step, _ in bad.records], [step for step, _ in good.records]) == ([0], [0, 1, 2, 3, 4])
    assert (bad.closed, good.closed) == (1, 1)


def test_a_disk_that_fails_in_the_middle_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers([JSONLTracker(tmp_path / "logs")])
    (tmp_path / "logs" / "metrics.jsonl").unlink()
    (tmp_path / "logs" / "metrics.jsonl").mkdir()
    for step in (1, 2):
        trackers.log(step, {"x": 1.0})
    assert len(caplog.messages) == 1


def test_an_error_of_ours_is_not_swallowed() -> None:
    with pytest.raises(KeyError):
        Trackers([Recorder(good=0, failure=KeyError("bug"))]).log(1, {})
    with pytest.raises(KeyError), Trackers([Recorder(at_close=KeyError("bug"))]):
        pass


def test_trackers_are_closed_at_the_end_of_their_run_also_where_it_fails() -> None:
    ended, failed = Recorder(), Recorder()
    with Trackers([ended]) as trackers:
        trackers.log(1, {})
    with pytest.raises(ZeroDivisionError, match="planted"), Trackers([failed]):
        raise ZeroDivisionError("planted")
    assert (ended.closed, failed.closed) == (1, 1)
    with pytest.raises(ZeroDivisionError) as raised, Trackers([Recorder(at_close=KeyError("bug"))]):
        raise ZeroDivisionError("planted")
    assert isinstance(raised.value.__context__, KeyError), "what ended the run is raised"


def test_rank_0_gets_all_trackers_and_the_others_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, options = str(tmp_path / "ckpt"), TrackingConfig(use_tensorboard=str(tmp_path / "tb"))
    for comm in (Rank1(), SingleProcess()):
        assert list(tmp_path.iterdir()) == []
        assert capsys.readouterr().out == ""
        trackers = make_trackers(path, options, {}, comm, ["reward"], total_steps=2)
        trackers.log(1, {"reward": 1.0})
        trackers.close()
    assert lines_of(tmp_path / "ckpt" / "logs" / "metrics.jsonl")[0]["reward"] == 1.0
    assert len(list((tmp_path / "tb").iterdir())) == 1
    assert capsys.readouterr().out == "step 1/2 | reward 1\n"


def test_runs_that_share_a_tensorboard_folder_get_a_subfolder_each(tmp_path: Path) -> None:
    def start(run: str, resumed_after: int | None = None, name: str | None = None) -> None:
        options = TrackingConfig(use_tensorboard=str(tmp_path / "tb"), wandb_run_name=name)
        trackers = make_trackers(str(tmp_path / run), options, {}, SingleProcess(), [], 2, resumed_after)
        trackers.log(1 + (resumed_after or 0), {"reward": 1.0})
        trackers.close()

    def steps() -> dict[str, list[int]]:
        runs = sorted((tmp_path / "tb").iterdir())
        return {run.name: [e.step for e in EventAccumulator(str(run)).Reload().Scalars("reward")] for run in runs}

    start("a/ppo")
    start("b/ppo")
    start("sft", name="team/first")
    assert steps() == {"ppo": [1], "ppo.1": [1], "team_first": [1]}
    start("a/ppo", resumed_after=1)
    start("b/ppo", resumed_after=1)
    assert steps() == {"ppo": [1, 2], "ppo.1": [1, 2], "team_first": [1]}


def test_a_save_path_that_cannot_be_written_fails_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--save_path .*file cannot be written"):
        make_trackers(str(tmp_path / "file"), TrackingConfig(), {}, SingleProcess(), [], total_steps=1)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_before_anything_is_loaded(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    check_trackers(TrackingConfig())
    with pytest.raises(ValueError, match=f"^--use_{package} needs the package {package}: run 'pip install {package}'"):
        check_trackers(TrackingConfig(use_tensorboard="tb", use_wandb="True"))
