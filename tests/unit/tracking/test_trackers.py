"""Trackers write what they are given, and never stop a run."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openppo.config import RunConfig
from openppo.tracking import ConsoleTracker, JSONLTracker, TensorBoardTracker, Trackers, make_trackers
from openppo.types import SingleProcess


class Rank1(SingleProcess):
    """``Comm`` of the second of two ranks."""

    rank = 1
    world_size = 2


class Recorder:
    """A tracker that remembers, and fails from its ``good``-th record on."""

    def __init__(self, good: int = 1000) -> None:
        self.good, self.closed = good, 0
        self.records: list[tuple[int, Any]] = []

    def log(self, step: int, metrics: Any) -> None:
        if len(self.records) >= self.good:
            raise OSError(28, "No space left on device")
        self.records.append((step, metrics))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self.log(step, samples)

    def close(self) -> None:
        self.closed += 1


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The parsed lines; NaN and Infinity, which Python would accept, are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with open(path, encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def test_jsonl_lines_parse_and_hold_step_time_and_metrics_in_order(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "new" / "logs")
    before = time.time()
    tracker.log(1, {"reward": 0.5, "kl": -0.01})
    tracker.log(2, {"reward": math.nan, "kl": math.inf, "lr": 1e-6})
    first, second = lines_of(tmp_path / "new" / "logs" / "metrics.jsonl")  # readable before close
    tracker.close()
    assert list(first) == ["step", "time", "reward", "kl"]
    assert (first["step"], first["reward"], first["kl"]) == (1, 0.5, -0.01)
    assert before <= first["time"] <= time.time()
    assert (second["reward"], second["kl"], second["lr"]) == (None, None, 1e-6)


def test_jsonl_appends_to_the_lines_of_an_earlier_run(tmp_path: Path) -> None:
    for step in (1, 2):
        JSONLTracker(tmp_path).log(step, {})
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_jsonl_samples_keep_any_text_and_any_value(tmp_path: Path) -> None:
    sample = {"prompt": "line\nbreak \u2028 \u00fc \u4f60", "response": "cut \ud83d", "score": math.nan, "ids": (1, 2)}
    tracker = JSONLTracker(tmp_path)
    tracker.log_samples(3, [sample, {"path": Path("a")}])
    first, second = lines_of(tmp_path / "samples.jsonl")
    assert (first["prompt"], first["response"]) == (sample["prompt"], sample["response"])
    assert (first["step"], first["score"], first["ids"], second["path"]) == (3, None, [1, 2], "a")
    assert "\u00fc" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")


def test_a_metric_cannot_take_the_name_of_the_step(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step"):
        JSONLTracker(tmp_path).log(1, {"step": 3.0})


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.log(1, {"policy/loss": 0.5, "reward": 1.0})
    tracker.log(2, {"policy/loss": 0.25, "reward": math.nan})
    tracker.log_samples(2, [{"prompt": "2 + 2 =", "response": "# 4\n*so*", "score": 1.0}])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 0.5), (2, 0.25)]
    assert math.isnan(events.Scalars("reward")[1].value)
    (text,) = events.Tensors("samples/0/text_summary")
    assert text.step == 2
    shown = text.tensor_proto.string_val[0].decode()
    assert "**prompt**\n\n    2 + 2 =" in shown
    assert "    # 4\n    *so*" in shown


def test_missing_tensorboard_names_the_flag_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--use_tensorboard.*pip install tensorboard"):
        TensorBoardTracker(tmp_path)


def test_console_prints_one_line_with_the_headline_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ConsoleTracker(["reward", "kl", "absent", "length", "time/step_s"], total_steps=20)
    tracker.log(3, {"time/step_s": 2.149, "kl": 0.01234, "other": 1.0, "reward": 0.41, "length": 1234.5})
    tracker.log(4, {"reward": math.nan})
    tracker.log(4, {"other": 1.0})
    tracker.log_samples(4, [{"prompt": "p"}])
    captured = capsys.readouterr()
    assert captured.out == "step 3/20 | reward 0.41 | kl 0.0123 | length 1234 | 2.1 s\nstep 4/20 | reward nan\n"
    assert captured.err == ""


def test_a_failing_tracker_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(good=1), Recorder()
    trackers = Trackers([bad, good])
    with caplog.at_level(logging.WARNING, logger="openppo"):
        for step in range(4):
            trackers.log(step, {"x": 1.0})
        trackers.log_samples(4, [{"prompt": "p"}])
        trackers.close()
        trackers.close()
    (record,) = caplog.records
    assert "Recorder cannot write" in record.getMessage()
    assert "No space left" in record.getMessage()
    assert len(bad.records) == 1
    assert [step for step, _ in good.records] == [0, 1, 2, 3, 4]
    assert (bad.closed, good.closed) == (1, 1)


def test_a_disk_that_fails_in_the_middle_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers([JSONLTracker(tmp_path / "logs")])
    (tmp_path / "logs" / "metrics.jsonl").unlink()
    (tmp_path / "logs" / "metrics.jsonl").mkdir()
    with caplog.at_level(logging.WARNING, logger="openppo"):
        trackers.log(1, {"x": 1.0})
        trackers.log(2, {"x": 1.0})
    assert len(caplog.records) == 1


def test_an_error_of_ours_is_not_swallowed() -> None:
    class Broken(Recorder):
        def log(self, step: int, metrics: Any) -> None:
            raise KeyError("bug")

    with pytest.raises(KeyError):
        Trackers([Broken()]).log(1, {})


def test_rank_0_gets_all_trackers_and_the_others_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(save_path=str(tmp_path / "ckpt"), use_tensorboard=str(tmp_path / "tb"))
    silent = make_trackers(run, Rank1(), ["reward"], total_steps=2)
    silent.log(1, {"reward": 1.0})
    silent.log_samples(1, [{"prompt": "p"}])
    silent.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""

    trackers = make_trackers(run, SingleProcess(), ["reward"], total_steps=2)
    trackers.log(1, {"reward": 1.0})
    trackers.close()
    assert lines_of(tmp_path / "ckpt" / "logs" / "metrics.jsonl")[0]["reward"] == 1.0
    assert len(list((tmp_path / "tb").iterdir())) == 1
    assert capsys.readouterr().out == "step 1/2 | reward 1\n"


def test_no_tensorboard_folder_no_tensorboard_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    make_trackers(RunConfig(save_path=str(tmp_path)), SingleProcess(), [], total_steps=1).close()


def test_a_save_path_that_cannot_be_written_fails_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--save_path .*file cannot be written"):
        make_trackers(RunConfig(save_path=str(tmp_path / "file")), SingleProcess(), [], total_steps=1)
