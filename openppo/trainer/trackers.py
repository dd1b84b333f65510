"""Trackers of a command, and the dump of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openppo.config import TrainPPOConfig, flat_dict
from openppo.strategy.comm import collective
from openppo.tracking import (
    RolloutTracker,
    Tracker,
    Trackers,
    cut_logs,
    environment,
    make_trackers,
    prepare_rollouts,
    save_run,
    set_aside_logs,
)

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    from openppo.strategy.deepspeed import DeepspeedStrategy


def start_trackers(
    config: Any,
    strategy: DeepspeedStrategy,
    headline: Sequence[str],
    total_steps: int,
    resume_step: int | None = None,
    own: Sequence[Tracker] = (),
) -> Trackers:
    """Trackers of a command, and ``own``; its resolved options and its environment as files in ``<save_path>/logs``.

    Logs of a run that resumes after step ``resume_step`` are continued there; any other logs are set aside.
    """
    path = config.run.save_path
    options = flat_dict(config)
    found = environment(strategy.comm)

    def prepare(logs: Path) -> None:
        set_aside_logs(logs) if resume_step is None else cut_logs(logs, resume_step)
        save_run(logs, options, found)

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--save_path {path}: cannot be written ({message}); choose another folder."
        )

    collective(
        strategy.comm,
        lambda: prepare(Path(path) / "logs") if strategy.is_main else None,
        OSError,
        raised=failure,
    )
    return make_trackers(
        path,
        config.tracking,
        options,
        comm=strategy.comm,
        headline=headline,
        total_steps=total_steps,
        resumed_after=resume_step,
        own=own,
    )


def rollout_trackers(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, resume_step: int | None
) -> list[Tracker]:
    """What writes ``--dump_rollouts``, on every rank, if it is given."""
    folder, comm = config.dump.dump_rollouts, strategy.comm
    if folder is None:
        return []

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--dump_rollouts {folder}: cannot be written ({message}); choose another folder."
        )

    path = Path(folder)
    collective(
        comm,
        lambda: prepare_rollouts(path, resume_step) if strategy.is_main else None,
        OSError,
        raised=failure,
    )
    return [RolloutTracker(path, comm.rank, config.dump.dump_max_mib * 2**20)]
