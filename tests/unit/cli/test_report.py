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
        (tmp_path / name / "logs" / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "reward": 0.5}) + "\n"
        )

    def run(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["report", *arguments])
        report.main()

    return run


def test_the_page_lies_beside_the_logs_of_one_run_or_where_it_is_told_to(
    run_report, tmp_path, capsys
):
    for arguments, place in (
        (["a"], "a/logs/report.html"),
        (["b/logs"], "b/logs/report.html"),
        (["a", "b"], "report.html"),
        (["a", "b", "--output", "pages/both.html"], "pages/both.html"),
    ):
        run_report(*arguments)
        assert (tmp_path / capsys.readouterr().out.strip()).samefile(tmp_path / place)
        page = (tmp_path / place).read_text()
        assert page.startswith("<!DOCTYPE html>")
        assert [name for name in "ab" if f'"name":"{name}"' in page] == (
            ["a", "b"] if "b" in arguments else [place[0]]
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder of a run: python -m openppo.cli.report RUN_DIR"),
        (["none"], "none has no logs/metrics.jsonl: name the --save_path of a run"),
        (
            ["a", "--output", "a/logs/metrics.jsonl/x.html"],
            "--output a/logs/metrics.jsonl/x.html: cannot be written",
        ),
        (["a", "--ouput", "x"], "unknown flag --ouput; did you mean --output?"),
    ],
)
def test_bad_input_is_one_line(run_report, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run_report(*arguments)
    assert ended.value.code == 2
    error: Any = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
