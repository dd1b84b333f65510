"""Folders of runs, written line by line as a run writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(name, metrics=rows, samples=rows, tokens=rows, config=options)`` gives the folder of a run."""

    def make(
        name: str,
        metrics: Sequence[Mapping[str, Any]] = ({"step": 1, "time": 0.0, "reward": 1.0},),
        samples: Sequence[Mapping[str, Any]] = (),
        tokens: Sequence[Mapping[str, Any]] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        logs = tmp_path / name / "logs"
        logs.mkdir(parents=True)
        for file, rows in (("metrics", metrics), ("samples", samples), ("tokens", tokens)):
            (logs / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (logs / "config.yaml").write_text(yaml.safe_dump(dict(config or {})))
        return logs.parent

    return make


def sample(step: int, number: int = 0, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    kind = {"evaluation": True} if more.pop("evaluation", False) else {}
    text = {"prompt": f"prompt {number}", "response": "ab", "finish_reason": "eos", "reward": 1.0, "rewards": {}}
    return {"step": step, "time": 0.0, **kind, "sample": number, **text, "response_length": 2} | more


def tokens(step: int, number: int = 0, evaluation: bool = False, **more: Any) -> dict[str, Any]:
    """A line of tokens.jsonl."""
    kind = {"evaluation": True} if evaluation else {}
    lists = {"first": 3, "n_tokens": 2, "texts": ["a", "b"], "ids": [1, 2], "trained": [1, 1], "value": [0.5, -0.5]}
    return {"step": step, "time": 0.0, **kind, "sample": number, **lists} | more
