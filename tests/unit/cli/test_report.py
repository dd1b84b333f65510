"""python -m openppo.cli.report: where the page goes, and what it says of bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openppo.cli import report


@pytest.fixture
def run_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")

    def run(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["report", *arguments])
        report.main()

    return run


def test_the_page_of_one_run_lies_beside_its_logs(
    run_report: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b/logs"):
        run_report(folder)
        place = tmp_path / folder.split("/")[0] / "logs" / "report.html"
        assert place.read_text().startswith("<!DOCTYPE html>")
        assert (tmp_path / capsys.readouterr().out.strip()).samefile(place)


def test_the_page_of_several_runs_lies_here_or_where_it_is_told_to(
    run_report: Callable[..., None], tmp_path: Path
) -> None:
    run_report("a", "b")
    run_report("a", "b", "--output", "pages/both.html")
    here, there = (tmp_path / "report.html").read_text(), (tmp_path / "pages" / "both.html").read_text()
    for page in (here, there):
        assert '"name":"a"' in page
        assert '"name":"b"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder of a run: python -m openppo.cli.report RUN_DIR"),
        (["none"], "none has no logs/metrics.jsonl: name the --save_path of a run"),
        (["a", "--output", "a/logs/metrics.jsonl/x.html"], "--output a/logs/metrics.jsonl/x.html cannot be written"),
        (["a", "--ouput", "x"], "unknown flag --ouput; did you mean --output?"),
    ],
)
def test_bad_input_is_one_line(
    run_report: Callable[..., None], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_report(*arguments)
    assert ended.value.code == 2
    error: Any = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
