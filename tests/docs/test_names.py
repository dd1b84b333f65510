"""Pages for people from other libraries have each name of the table that errors print, and no other."""

import re
import runpy
import shlex

import pytest

from openppo.config import TrainPPOConfig
from openppo.config.fields import declared_options
from openppo.config.foreign import NAMES, ForeignName, answer_by_meaning
from tests.docs.conftest import REPO

DOCS = REPO / "docs"
NAMED = r"`([\w.]+)`"
WRITTEN_BY_HAND = {
    "trl/PPOConfig": "## Fields of PPOConfig",
    "trl/TrainingArguments": "## Fields of TrainingArguments",
}
OPTIONS = declared_options(TrainPPOConfig)


def table(heading: str) -> list[tuple[str, str]]:
    """Both cells of each row below a heading of docs/trl.md."""
    _, _, after = (DOCS / "trl.md").read_text().partition(heading)
    section = after.partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, flags=re.MULTILINE)
    return rows[2:]


def test_tables_are_those_that_errors_print():
    """After a change of openppo/config/foreign: ``python docs/hooks/names.py``."""
    hook = runpy.run_path(str(DOCS / "hooks/names.py"))
    pages = {page: page.read_text() for page in DOCS.rglob("*.md")}
    assert [str(page) for page, text in pages.items() if hook["written"](text) != text] == []
    sections = [match[1] for text in pages.values() for match in hook["BLOCK"].finditer(text)]
    assert sorted(sections) == sorted([*(NAMES.keys() - WRITTEN_BY_HAND.keys()), "values"])
    for section in NAMES.keys() - WRITTEN_BY_HAND.keys():
        page = DOCS / f"{section.split('/')[0]}.md"
        assert f"<!-- names of {section} -->" in pages[page]


@pytest.mark.parametrize("section", WRITTEN_BY_HAND)
def test_rows_written_by_hand_name_what_the_table_has(section):
    rows = table(WRITTEN_BY_HAND[section])
    homes = {name: here for names, here in rows for name in re.findall(NAMED, names)}
    listed = {name: row for row in NAMES[section] for name in row.names}
    assert listed.keys() - homes.keys() == set()
    assert [name for name in homes.keys() - listed.keys() if name not in OPTIONS] == []
    for name, row in listed.items():
        flags = re.findall(r"--([a-z0-9_]+)", row.flags)
        assert [flag for flag in flags if f"`--{flag}" not in homes[name]] == [], name


def test_each_key_of_the_command_of_verl_has_its_flag_in_ours():
    text = (DOCS / "verl.md").read_text().replace("\\\n", " ")
    verl = re.search(r"main_ppo ( .*)", text)
    ours = re.search(r"openppo\.cli\.train_ppo ( .*)", text)
    assert verl is not None and ours is not None
    keys = [word.partition("=")[0] for word in shlex.split(verl[1])]
    assert len(keys) > 20
    rows = {name: row for row in NAMES["verl/main_ppo"] for name in row.names}
    assert [key for key in keys if not is_in(rows[key], ours[1] + ENGINE)] == []


ENGINE = " --rollout_engine --vllm_gpu_memory_utilization --vllm_tensor_parallel_size"
"""Flags of vLLM, which are named below the command: it runs without vLLM."""


def is_in(row: ForeignName, command: str) -> bool:
    """True if the command has the flags of a row, or the row has none."""
    flags = re.findall(r"--[a-z0-9_]+", row.flags)
    return all(flag in command.split() for flag in flags)


def test_names_of_the_issue_are_answered():
    for name in "beta num_generations max_new_tokens output_dir n_samples epochs".split():
        assert answer_by_meaning(name, OPTIONS) is not None
