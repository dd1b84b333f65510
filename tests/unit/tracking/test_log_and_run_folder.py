"""The logger speaks for rank 0; the run folder gets the resolved options."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
import yaml
from rich.table import Table
from rich.text import Text

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.tracking import (
    ConsoleTracker,
    Trackers,
    cut_logs,
    get_logger,
    progress_bar,
    save_config,
    set_aside_logs,
    setup_logging,
)
from openppo.tracking.terminal import announce
from openppo.tracking.trackers import JSONLTracker


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """Undo what ``setup_logging`` does."""
    logger = get_logger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_rank_0_informs_and_the_others_only_warn_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 3):
        setup_logging(rank)
        get_logger().info("loaded %d rows", 7)
        get_logger().warning("careful")
    captured = capsys.readouterr()
    assert captured.err == "[openppo] loaded 7 rows\n[openppo] careful\n[openppo rank 3] careful\n"
    assert captured.out == ""


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_a_file_the_same_words_with_the_name_before_each_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = Table("role", "model")
    table.add_row("actor", Text("tiny", style="bold"))
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        setup_logging(0)
        announce(table)
        get_logger().warning("careful")
        shown[stream.isatty()] = stream.getvalue()
    assert "\x1b[1mtiny" in shown[True]
    assert "\x1b[33mwarning: careful\x1b[0m" in shown[True]
    lines = shown[False].splitlines()
    assert all(line.startswith("[openppo]") for line in lines)
    assert "\x1b" not in shown[False]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown[True]).replace("warning: ", "").splitlines()
    assert [line.removeprefix("[openppo] ").rstrip() for line in lines] == [line.rstrip() for line in plain]
    assert "\x1b" not in caplog.text  # what other handlers of the logger get


def test_a_full_disk_under_all_output_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``> run.log 2>&1``: that the console cannot be written to can then not be said either."""
    monkeypatch.setattr(sys.modules["openppo.tracking.progress_bar"], "SECONDS_BETWEEN_LINES", 0.0)
    with open("/dev/full", "wb", buffering=0) as full, io.TextIOWrapper(full, write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(0)
        trackers = Trackers([ConsoleTracker(["reward"], total_steps=2), JSONLTracker(tmp_path)])
        for step in progress_bar(2, "training", enabled=True):
            trackers.log(step, {"reward": 1.0})
        trackers.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_logger_is_a_standard_one_and_silent_until_a_command_sets_it_up() -> None:
    assert get_logger() is logging.getLogger("openppo")


def test_config_yaml_reads_back_in_order_with_tuples_as_lists(tmp_path: Path) -> None:
    config = from_options(TrainPPOConfig, pretrain="\u00fcbung", reward_fn="r.py", prompt_data="p.jsonl")
    options = flat_dict(config)
    save_config(tmp_path / "new" / "run", options)
    text = (tmp_path / "new" / "run" / "config.yaml").read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    assert list(read) == list(options)
    assert read["adam_betas"] == [0.9, 0.95]
    assert read["top_k"] is None
    assert read["pretrain"] == "\u00fcbung"
    assert all(read[name] == (list(value) if isinstance(value, tuple) else value) for name, value in options.items())


def test_paths_and_enums_are_written_as_their_text(tmp_path: Path) -> None:
    class Color(Enum):
        RED = "red"

    save_config(tmp_path, {"path": Path("a/b"), "color": Color.RED, "nested": {"pair": (1, 2)}})
    read = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert read == {"path": "a/b", "color": "red", "nested": {"pair": [1, 2]}}


def test_small_learning_rates_read_back_as_numbers(tmp_path: Path) -> None:
    save_config(tmp_path, {"actor_learning_rate": 1e-6, "other": 5e-05})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"actor_learning_rate": 1e-6, "other": 5e-05}


def test_a_second_run_in_the_same_folder_keeps_the_logs_of_the_first(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for run in ("first", "second", "third"):
        set_aside_logs(logs)
        save_config(logs, {"save_path": "."})
        (logs / "metrics.jsonl").write_text(run)
    kept = {folder.name: (folder / "metrics.jsonl").read_text() for folder in tmp_path.iterdir()}
    assert kept == {"logs": "third", "logs.1": "first", "logs.2": "second"}


def test_logs_of_a_run_that_goes_on_end_at_its_checkpoint(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "reward": "ä"}) + "\n" for step in (1, 2, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 1, "cut')
    (tmp_path / "config.yaml").write_text("a: 1")
    cut_logs(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]
    cut_logs(tmp_path / "none", 2)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r", "\ud800"])
def test_a_logged_text_may_hold_any_character_that_ends_a_line_elsewhere(tmp_path: Path, character: str) -> None:
    tracker = JSONLTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log_samples(step, [{"response": f"a{character}b"}])
    before = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    cut_logs(tmp_path, 2)
    assert (tmp_path / "samples.jsonl").read_bytes().split(b"\n") == [*before[:2], b""]


def test_lines_that_say_no_step_stay_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = ['{"note": "mine"}', "no JSON", '{"step": "two"}', "[1]", "", "\udcff", "[" * 100_000]
    lines = [*own, '{"step": 2}', '{"step": 3}']
    (tmp_path / "own.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with caplog.at_level(logging.WARNING, "openppo"):
        cut_logs(tmp_path, 2)
    kept = (tmp_path / "own.jsonl").read_text(errors="surrogateescape")
    assert kept == "\n".join([*own, '{"step": 2}']) + "\n"
    [record] = caplog.records
    expected = f"{tmp_path}/own.jsonl, line 1 and 5 more: no JSON with a number as 'step'; kept as it is"
    assert record.getMessage() == expected


def test_a_last_line_that_lacks_its_end_only_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    cut_logs(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
