"""A bar on a terminal, few lines in a log file."""

from __future__ import annotations

import io
import sys

import pytest

from openppo.tracking import ProgressBar, progress_bar

progress_module = sys.modules[ProgressBar.__module__]


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the bar's log lines see."""
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_iteration_yields_every_item_of_an_iterable_or_a_total() -> None:
    assert list(progress_bar(["a", "b"], "letters", enabled=False)) == ["a", "b"]
    assert list(progress_bar(3, "numbers", enabled=True)) == [0, 1, 2]
    assert list(progress_bar((n for n in range(2)), "without length", enabled=True)) == [0, 1]


def test_a_short_phase_prints_nothing_in_a_log(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress_bar(100, "short", enabled=True):
        clock[0] += 0.29
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_long_phase_prints_a_line_every_30_seconds_and_one_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in progress_bar(100, "generation", enabled=True):
        clock[0] += 1.0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert "\r" not in captured.err
    assert [line.split("%")[0].split()[-1] for line in lines] == ["30", "60", "90", "100"]
    assert "30/100 [00:30<01:10" in lines[0]  # elapsed and left


def test_manual_updates_work_and_the_last_line_comes_also_after_an_error(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError), progress_bar(10, "work", enabled=True) as bar:
        bar.update(4)
        clock[0] += 31.0
        raise KeyError
    (line,) = capsys.readouterr().err.splitlines()
    assert "4/10" in line


def test_disabled_prints_nothing_even_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_bar(10, "work", enabled=False) as bar:
            clock[0] += 100.0
            bar.update(10)
        assert stderr.getvalue() == ""


def test_a_terminal_gets_a_bar_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    for _ in progress_bar(3, "bar", enabled=True):
        pass
    shown = stderr.getvalue()
    assert "bar          0% " in shown
    assert "0/3  00:00, ? left" in shown
    assert "\n" not in shown
    assert shown.rsplit("\r", 1)[0].rstrip(" ").endswith("\r")  # last thing written: blanks
