"""Which watchdog a command has around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from openppo.config import RunConfig

RunLine = Callable[[str], Any]


@pytest.mark.parametrize(
    ("line", "heartbeat", "stall", "resumes"),
    [("serve_rm", 45.0, 0.0, False), ("sft --heartbeat_timeout 30", 30.0, 2700.0, True)],
)
def test_only_training_can_stall_and_be_resumed(
    line: str, heartbeat: float, stall: float, resumes: bool, run_line: RunLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[RunConfig, str]] = []

    def record(limits: RunConfig, where: object, options: object, resume: str) -> None:
        found.append((limits, resume))
        sys.exit(0)

    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", record)
    run_line(line)
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
    ("line", "roles"),
    [("ppo -reward_fn --reward_pretrain M/reward", ["actor", "critic", "reward", "refer"]), ("sft", ["model"])],
)
def test_out_of_memory_the_watch_can_say_what_each_model_takes(
    line: str, roles: list[str], run_line: RunLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):
        monkeypatch.setattr(f"openppo.trainer.{trainer}.fit", lambda self: sys.exit(0))
    watch = Recorder()
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", lambda *given: watch)
    run_line(line)
    explained = watch.explain_memory()
    for role in roles:
        (said,) = [text for text in explained if text.startswith(role)]
        assert " MiB" in said
