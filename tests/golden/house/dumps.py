"""Dumps of rollouts in one normal form, into which each format is read by a function of its own.

A sample in normal form is what one seed made of one prompt: ``step``, ``split``, ``group``, fields of the whole
(``reward``, ``rewards`` by name, ``ending``, ``turns``, ``label``, ...) and ``segments``, each with ``ids``, ``mask``
(a text of 0 and 1), ``log_probs``, ``versions``, ``rewards`` by action and ``finish``. A format that lacks one of
``UNKNOWN`` has null there, which is compared with nothing.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Sample = dict[str, Any]
UNKNOWN = ("versions", "rewards")
TEXTS = ("rewards", "extra", "messages")
WHOLE = (
    "step",
    "split",
    "group",
    "row",
    "source",
    "task",
    "label",
    "reward",
    "ending",
    "turns",
    "error",
    "output",
)


def read_rollouts(folder: Path) -> list[Sample]:
    """Samples of all files of ``--dump_rollouts``, ranks after each other, in their order."""
    samples: list[Sample] = []
    for file in sorted(folder.glob("*.jsonl")):
        rows = read_rows(file)
        (reader,) = [reader for is_its, reader in FORMATS if is_its(rows)]
        samples += reader(rows)
    return samples


def read_rows(file: Path) -> list[Row]:
    """JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def is_row_a_part(rows: list[Row]) -> bool:
    """A row is a segment: of an episode in parts there are several rows, each with the fields of the whole."""
    return all("token_ids" in row for row in rows)


def read_parts(rows: list[Row]) -> list[Sample]:
    """Join rows of one sample: neighbours with one conversation, until they have all its turns."""
    samples: list[Sample] = []
    turns_missing = 0
    for row in rows:
        whole = {name: row[name] for name in WHOLE} | {
            name: json.loads(row[name]) for name in TEXTS
        }
        segment = segment_of(row)
        if turns_missing > 0 and whole.items() <= samples[-1].items():
            samples[-1]["segments"].append(segment)
        else:
            samples.append(whole | {"segments": [segment]})
            turns_missing = row["turns"]
        turns_missing -= len(segment["mask"].replace("0", " ").split())
    return samples


def segment_of(row: Row) -> Row:
    """The segment in a row that is one, which has neither versions nor rewards by action."""
    mask = "".join(str(int(flag)) for flag in row["action_mask"])
    known = {
        "ids": row["token_ids"],
        "mask": mask,
        "log_probs": row["log_probs"],
        "finish": row["finish_reason"],
    }
    return known | dict.fromkeys(UNKNOWN)


def is_row_a_sample(rows: list[Row]) -> bool:
    """A row is a whole sample, with its segments."""
    return all("segments" in row for row in rows)


def read_samples(rows: list[Row]) -> list[Sample]:
    """Take the samples as they are."""
    samples: list[Sample] = []
    for row in rows:
        whole = {name: row[name] for name in WHOLE}
        texts = {name: json.loads(row[name]) for name in TEXTS}
        segments = [whole_segment(segment) for segment in row["segments"]]
        samples.append(whole | texts | {"segments": segments})
    return samples


def whole_segment(segment: Row) -> Row:
    """Give a dumped segment the names of the normal form."""
    pairs = zip(segment["token_rewards"], segment["action_mask"], strict=True)
    return {
        "ids": segment["token_ids"],
        "mask": "".join(str(int(flag)) for flag in segment["action_mask"]),
        "log_probs": segment["log_probs"],
        "finish": segment["finish_reason"],
        "versions": segment["versions"],
        "rewards": [reward for reward, is_action in pairs if is_action],
    }


FORMATS: tuple[tuple[Callable[[list[Row]], bool], Callable[[list[Row]], list[Sample]]], ...] = (
    (is_row_a_part, read_parts),
    (is_row_a_sample, read_samples),
)
"""Which rows a reader reads, and the reader. A new format is a new pair."""

COLUMNS = ("value", "reward", "advantage", "return")


def read_shown(rows: Iterable[Row]) -> dict[str, Row]:
    """Samples of tokens.jsonl, by a name: their ids, and numbers of each action as training had them.

    In the order of their ids, so that the choice of what is shown first is none.
    """
    named: dict[str, Row] = {}
    for row in sorted(
        rows, key=lambda row: (row["step"], "evaluation" in row, row["prompt_ids"], row["ids"])
    ):
        columns = {name: row[name] for name in COLUMNS if name in row}
        actions = {
            name: [value for value in column if value is not None]
            for name, column in columns.items()
        }
        kind = "eval" if "evaluation" in row else "train"
        shown = {
            "prompt": row["prompt_ids"],
            "ids": row["ids"],
            "trained": "".join(map(str, row["trained"])),
        }
        number = sum(name.startswith(f"step {row['step']} {kind} ") for name in named)
        named[f"step {row['step']} {kind} {number}"] = shown | actions
    return named
