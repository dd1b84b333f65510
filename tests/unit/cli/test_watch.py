"""Which watchdog a command has around it."""

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

    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", record)
    run_in_process(command, *arguments.format(models=models).split())
    ((limits, resume),) = found
    assert (limits.heartbeat_timeout, limits.stall_timeout) == (heartbeat, stall)
    assert ("--load_checkpoint" in resume) is resumes


class Recorder:
    """Stands in for the watchdog, and keeps what the command gives it."""

    def __init__(self, *given: object) -> None:
        self.explain_memory: Callable[[], list[str]] = list

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None: ...

    def refuse(self, message: str) -> None:
        raise AssertionError(message)


@pytest.mark.parametrize(
    ("command", "data", "roles"),
    [
        ("train_ppo", "--prompt_data {data} --reward_pretrain {models}/reward", ["actor", "critic", "reward", "refer"]),
        ("train_sft", "--dataset {data}", ["model"]),
    ],
)
def test_out_of_memory_the_watch_can_say_what_each_model_takes(
    command: str,
    data: str,
    roles: list[str],
    models: Path,
    run_in_process: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):
        monkeypatch.setattr(f"openppo.trainer.{trainer}.fit", lambda self: sys.exit(0))
    watch = Recorder()
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", lambda *given: watch)
    (tmp_path / "data.jsonl").write_text('{"input": "abc", "output": "de"}\n' * 4)
    sizes = "--rollout_batch_size 4 --generate_max_len 8" if command == "train_ppo" else ""
    arguments = f"--pretrain {{models}}/actor {data} --train_batch_size 4 {sizes}"
    run_in_process(command, *arguments.format(models=models, data=tmp_path / "data.jsonl").split())
    explained = watch.explain_memory()
    for role in roles:
        (line,) = [line for line in explained if line.startswith(role)]
        assert " MiB" in line
