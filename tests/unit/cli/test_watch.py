"""Which watch a command has around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openppo.config import RunConfig

RunCommand = Callable[..., Any]
SERVE = "--reward_pretrain {models}/reward"
TRAIN = "--pretrain {models}/actor --dataset sft.jsonl --heartbeat_timeout 30"


@pytest.mark.parametrize(
    ("command", "arguments", "heartbeat", "stall", "resumes"),
    [("serve_rm", SERVE, 45.0, 0.0, False), ("train_sft", TRAIN, 30.0, 2700.0, True)],
)
def test_only_training_can_stall_and_be_resumed(
    command: str,
    arguments: str,
    heartbeat: float,
    stall: float,
    resumes: bool,
    models: Path,
    run_in_process: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[RunConfig, str]] = []

    def record(limits: RunConfig, where: object, options: object, resume: str) -> None:
        found.append((limits, resume))
        sys.exit(0)

    monkeypatch.setattr("openppo.strategy.watch.Watch", record)
    run_in_process(command, *arguments.format(models=models).split())
    ((limits, resume),) = found
    assert (limits.heartbeat_timeout, limits.stall_timeout) == (heartbeat, stall)
    assert ("--load_checkpoint" in resume) is resumes
