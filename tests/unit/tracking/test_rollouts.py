"""Dumped rollouts: nothing is lost or doubled whatever the sizes of files, and other programs read them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from openppo.tracking import RolloutTracker, prepare_rollouts
from openppo.tracking.report import run_data
from openppo.tracking.report.page import payload
from openppo.tracking.report.run_data import read_run
from openppo.trainer.sample_rows import rollout_row
from openppo.types import Ending, Episode, Prompt
from tests.unit.trainer.test_sample_log import BYTES, ONE

LABELS: list[Any] = ["text", None, 3, {"a": [1, None]}, ["x", 2.5], ""]
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "b"},
]


def rows_of(step: int) -> list[dict[str, Any]]:
    """Rows whose labels, rewards and messages are of all types, the last of an agent."""
    samples = [
        dataclasses.replace(ONE, prompt=Prompt(f"{step}", [1], label=label, source="s"))
        for label in LABELS
    ]
    samples[0] = dataclasses.replace(
        samples[0], scores={"b": 1, "c": 2}, extras={"n": 2.0}, greedy=ONE
    )
    samples.append(
        dataclasses.replace(ONE, episode=Episode(TALK, Ending.TIMEOUT, n_turns=1, error="late"))
    )
    return [
        {"sample": i} | rollout_row(sample, BYTES, {"a": 0.25}) for i, sample in enumerate(samples)
    ]


def write(folder: Path, steps: range, most_bytes: float = 4000.0, rank: int = 0) -> None:
    """Rows of ``steps``, and an evaluation of every second one."""
    tracker = RolloutTracker(folder, rank, most_bytes)
    for step in steps:
        tracker.log_rollouts(step, "train", rows_of(step))
        tracker.log_rollouts(step, "eval", rows_of(step) if step % 2 == 0 else [])


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


@pytest.mark.parametrize("resume", [1, 4, 5, 6])
def test_a_resumed_dump_is_that_of_a_run_that_never_stopped(tmp_path: Path, resume: int) -> None:
    for place in ("whole", "parts"):
        prepare_rollouts(tmp_path / place, None)
        for rank in (0, 1):
            write(tmp_path / place, range(1, 7), rank=rank)
    whole = files_of(tmp_path / "whole")
    assert len(whole) > 8, "several files for each split and rank"
    with (tmp_path / "parts" / max(whole)).open("ab") as file:
        file.write(b'{"step": 6, "split": "tr')  # killed while it wrote
    prepare_rollouts(tmp_path / "parts", resume)
    cut = [
        json.loads(line)["step"]
        for text in files_of(tmp_path / "parts").values()
        for line in text.splitlines()
    ]
    assert max(cut) == resume and cut.count(1) == 2 * 7
    for rank in (0, 1):
        write(tmp_path / "parts", range(resume + 1, 7), rank=rank)
    assert files_of(tmp_path / "parts") == whole


def test_another_run_in_the_folder_moves_the_first_aside(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    for _ in range(2):
        prepare_rollouts(folder, None)
        (folder / "notes.txt").touch()
        write(folder, range(1, 3))
    assert files_of(folder) == files_of(tmp_path / "rollouts.1") != {}
    assert not (tmp_path / "rollouts.1" / "notes.txt").exists(), "what is not ours stays"


def test_datasets_reads_splits_and_all_types_as_one_table(tmp_path: Path) -> None:
    tracker = RolloutTracker(tmp_path / "rollouts", 0, 1.0)
    prepare_rollouts(tmp_path / "rollouts", None)
    for step in (1, 2, 3):
        for row in rows_of(step):  # a file for each, of one type
            tracker.log_rollouts(step, "train", [row])
    tracker.log_rollouts(3, "eval", rows_of(3))
    assert len(files_of(tmp_path / "rollouts")) == 22
    splits = load_dataset(str(tmp_path / "rollouts"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 21, "test": 7}
    files = [str(file) for file in sorted((tmp_path / "rollouts").glob("*.jsonl"))]
    whole = load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"), split="train")
    assert len(whole) == 28
    first = [row for row in whole if row["step"] == 1]
    assert [row["label"] for row in first] == [
        "text",
        "",
        "3",
        '{"a": [1, null]}',
        '["x", 2.5]',
        "",
        "x",
    ]
    assert (first[0]["rewards"], first[0]["reward"]) == ('{"b": 1, "c": 2}', 3.0)
    assert [row["extra"] for row in first] == ['{"n": 2.0}', *["{}"] * 6]
    assert [(row["reward"], row["prompt"], row["source"]) for row in first[1:6]] == [
        (0.5, "1", "s")
    ] * 5
    assert (first[6]["ending"], first[6]["error"], json.loads(first[6]["messages"])) == (
        "timeout",
        "late",
        TALK,
    )
    assert [row["greedy"] == "null" for row in first] == [False, *[True] * 6]
    names = ("token_ids", "action_mask", "log_probs", "versions")
    expected = {name: getattr(ONE.last, name) for name in names} | {"token_rewards": [0.0] * 3}
    for row in whole:
        [segment] = row["segments"]
        assert {name: segment[name] for name in expected} == expected


def test_the_report_reads_a_dump_as_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_rollouts(tmp_path, None)
    write(tmp_path, range(1, 9))
    (run,) = payload([read_run(tmp_path)])["runs"]
    assert len(run["samples"]) == 7 * (8 + 4)
    by_kind = {
        kind: [s for s in run["samples"] if bool(s.get("evaluation")) == kind]
        for kind in (False, True)
    }
    assert {kind: sorted({s["step"] for s in of}) for kind, of in by_kind.items()} == {
        False: list(range(1, 9)),
        True: [2, 4, 6, 8],
    }
    assert (run["samples"][0]["rewards"], run["samples"][1]["rewards"]) == (
        {"b": 1, "c": 2},
        {"a": 2.0},
    )
    talks = [sample["messages"] for sample in run["samples"] if "messages" in sample]
    assert talks == [TALK] * 12 and sum("ending" in sample for sample in run["samples"]) == 12
    monkeypatch.setattr(run_data, "_MOST_BYTES", 3 * len(json.dumps(rows_of(1))))
    thinned = read_run(tmp_path).samples
    assert {line.key[0] for line in thinned} == {8} and len(thinned) == 14, "every n-th step, whole"


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    tracker = RolloutTracker(tmp_path / "dump", 0, 1e9)
    tracker.log_rollouts(1, "train", rows_of(1))
    assert [*files_of(tmp_path / "dump")] == ["train-rank00000-00000.jsonl"]
