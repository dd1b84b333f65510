"""Totals are printed beside those of the commit where the work started, and never fail a run."""

import subprocess

import pytest

from openppo.config import TrainPPOConfig
from openppo.config.fields import declared_options, rules_of
from tests.rules import totals
from tests.rules.test_options import command_configs

SOURCE = '''"""A module."""

# A comment.
LIMIT = 3
"""A limit."""


def double(number):
    """Twice a number."""
    return (
        2 * number  # in two lines
    )
'''


def test_tokens_and_lines_leave_out_comments_and_docstrings():
    assert totals.code(SOURCE) == (3 + 6 + 6, 1 + 1 + 3)


def test_a_text_over_several_lines_is_code_on_each():
    assert totals.code('text = """a\nb\nc"""\n') == (3, 3)


def test_table_shows_both_columns_and_the_change():
    now = {"tokens": 1050, "options": None}
    assert totals.table(now, {"tokens": 1000, "options": 240}, "12e90e7032d1").splitlines() == [
        "openppo/                   now   at 12e90e70    change",
        "tokens                   1,050         1,000     +5.0%",
        "options                unknown           240          ",
    ]


def test_options_are_those_of_all_commands():
    options = {name for config in command_configs().values() for name in declared_options(config)}
    of_ppo = declared_options(TrainPPOConfig).values()
    flags = [option for option in of_ppo if not rules_of(option).of_files]
    assert totals.n_options(totals.REPO) == (len(options), len(flags))
    assert len(options) > len(flags) > 100


def test_package_without_commands_has_no_known_options(tmp_path):
    assert totals.n_options(tmp_path) == (None, None)


def test_unknown_commit_leaves_the_totals_of_today(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["totals", "0123456789abcdef"])
    totals.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("totals at 01234567 are not shown: fatal: ")
    assert [line.split()[0] for line in lines[1:]] == [
        "openppo/",
        "tokens",
        "code",
        "lines",
        "files",
        "options",
        "flags",
    ]


def test_start_of_the_work_is_shown_where_the_clone_has_it(monkeypatch, capsys):
    look = ["git", "cat-file", "-e", f"{totals.START}^{{commit}}"]
    if subprocess.run(look, cwd=totals.REPO, capture_output=True).returncode != 0:
        pytest.skip("a shallow clone, or none")
    monkeypatch.setattr("sys.argv", ["totals"])
    totals.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["openppo/", "now", "at", totals.START[:8], "change"]
    assert lines[1].split()[2] == "239,731"
    assert lines[-2].split()[2] == "240"
    assert lines[-1].startswith("flags of train_ppo")
