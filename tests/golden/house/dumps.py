"""Dumps of rollouts in a normal form.

A sample in normal form is what one seed made of one prompt: ``step``, ``split``, ``group``, fields of the whole
(``reward``, ``rewards`` by name, ``ending``, ``turns``, ``label``, ...) and ``segments``, each with ``ids``, ``mask``
(a text of 0 and 1), ``log_probs``, ``versions``, ``rewards`` by action and ``finish``.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Sample = dict[str, Any]
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
        samples += read_samples(read_rows(file))
    return samples


def read_rows(file: Path) -> list[Row]:
    """JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


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
