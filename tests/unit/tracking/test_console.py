"""The log, progress bars and tables on a terminal and in a file."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from openppo.tracking import (
    ConsoleTracker,
    JSONLTracker,
    Trackers,
    console,
    progress_bar,
    setup_logging,
)
from openppo.tracking.console import escape_control, log_lines, table_lines


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """Undo ``setup_logging``."""
    logger = logging.getLogger("openppo")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (io.StringIO(), "[openppo]\n[openppo] role   model\n[openppo] careful\n"),
        (Terminal(), "\nrole   model\n\x1b[33mwarning: careful\x1b[0m\n"),
    ],
)
def test_files_name_the_rank_on_each_line_and_terminals_color_warnings(
    monkeypatch, stream, expected
):
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging(0)
    log_lines(["", "role   model"])
    logging.getLogger("openppo").warning("careful")
    setup_logging(3)  # other ranks only warn
    logging.getLogger("openppo").info("loaded")
    logging.getLogger("openppo").warning("careful")
    assert stream.getvalue() == expected + "[openppo rank 3] careful\n"


def test_records_cannot_command_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging(0)
    logging.getLogger("openppo").warning(
        "a program said %s\nbelow", "\x1b]0;title\x07 \x1b[2J\u202e red\r"
    )
    first, second = stream.getvalue().splitlines()
    assert first == r"[openppo] a program said \x1b]0;title\x07 \x1b[2J\u202e red\r"
    assert second == "[openppo] below"


def test_a_full_disk_under_all_output_does_not_stop_the_run(tmp_path, monkeypatch):
    """As with ``> run.log 2>&1``: the failure cannot be reported either."""
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    with (
        open("/dev/full", "wb", buffering=0) as full,
        io.TextIOWrapper(full, write_through=True) as stream,
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(0)
        trackers = Trackers([ConsoleTracker(["reward"], total_steps=2), JSONLTracker(tmp_path)])
        for step in progress_bar(2, "training", enabled=True):
            trackers.log(step, {"reward": 1.0})
        trackers.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_terminal_breaks_messages_at_blanks_and_keeps_paths_whole(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "40")
    setup_logging(0)
    logging.getLogger("openppo").info(
        "saved the trained model of this run to /a/path/of/%s\n  table  1", "letters/" * 6
    )
    assert stderr.getvalue().splitlines() == [
        "saved the trained model of this run to",
        "/a/path/of/" + "letters/" * 6,
        "  table  1",
    ]


def test_a_table_is_aligned_and_its_last_column_wraps():
    rows = [("role", "size", "text"), ("a", "1", "word " * 30), ("longer", "1,000", "x" * 180)]
    lines = table_lines(rows, right={1}, indent=2)
    assert lines[0] == "  role     size  text"
    assert [line[10:15] for line in lines if line[2] != " "] == [" size", "    1", "1,000"]
    assert max(map(len, lines)) == console.WIDTH
    assert "".join(line[17:] for line in lines[-3:]) == "x" * 180
    assert table_lines([("数据", "a"), ("rows", "b")]) == ["数据  a", "rows  b"], (
        "wide characters take two columns"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\x1b[2J\u202e\ud83d", "a\\tb\\x1b[2J\\u202e\\ud83d"),
        ("wide\u3000blank ä", "wide blank ä"),
        ("abcdefghij", "abcd ... (+6 characters)"),
    ],
)
def test_escaped_text_is_one_harmless_line(text, shown):
    assert escape_control(text, 4 if len(text) == 10 else None) == shown
    assert escape_control("abcdefghij", 4, keep="end") == "(+6 characters) ... ghij"


@pytest.mark.parametrize(("seconds", "shares"), [(0.29, []), (1.0, ["30", "60", "90", "100"])])
def test_a_file_gets_a_line_every_30_seconds_and_one_at_the_end(
    monkeypatch, capsys, seconds, shares
):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    for _ in progress_bar(100, "generation", enabled=True):
        clock[0] += seconds
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, "\r" in err) == ("", False)
    assert [line.split("%")[0].split()[-1] for line in lines] == shares
    assert not lines or "30/100 [00:30<01:10" in lines[0]  # elapsed and left
    with pytest.raises(KeyError), progress_bar(10, "work", enabled=True) as bar:
        bar.update(4, total=8)  # less work than was thought
        clock[0] += 31.0
        raise KeyError
    (line,) = capsys.readouterr().err.splitlines()
    assert "4/8" in line, "the last line comes also after an error"


def test_a_terminal_gets_a_bar_that_vanishes(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(progress_bar(["a", "b"], "letters", enabled=False)) == ["a", "b"]
    assert list(progress_bar((n for n in range(2)), "without length", enabled=False)) == [0, 1]
    assert stderr.getvalue() == ""
    assert list(progress_bar(3, "bar", enabled=True)) == [0, 1, 2]
    shown = stderr.getvalue()
    assert "bar          0% " in shown
    assert "0/3  00:00, ? left" in shown
    assert "\n" not in shown
    assert shown.rsplit("\r", 1)[0].rstrip(" ").endswith("\r")  # last thing written: blanks
