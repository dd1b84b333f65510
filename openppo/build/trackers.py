"""Trackers of a command, and the dump of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.resolved import Resolved
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
    trackers: Sequence[Tracker] = (),
    options: Mapping[str, Any] | None = None,
) -> Trackers:
    """Start the trackers of a command beside ``trackers``; write options and environment to ``<save_path>/logs``.

    Logs of a run that resumes after step ``resume_step`` are continued there; any other logs are set aside. ``options``
    are recorded, by default those of ``config``.
    """
    options = dict(flat_dict(config) if options is None else options)
    path = options["save_path"]
    facts = environment(strategy.comm)

    def prepare_logs() -> None:
        if not strategy.is_main:
            return
        logs = Path(path) / "logs"
        if resume_step is None:
            set_aside_logs(logs)
        else:
            cut_logs(logs, resume_step)
        save_run(logs, options, facts)

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--save_path {path}: cannot be written ({message}); choose another folder."
        )

    collective(strategy.comm, prepare_logs, OSError, raised=failure)
    return make_trackers(
        path,
        config.tracking,
        options,
        comm=strategy.comm,
        headline=headline,
        total_steps=total_steps,
        resumed_after=resume_step,
        custom=trackers,
    )


def start_ppo_trackers(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    headline: Sequence[str],
    total_steps: int,
    found_step: int | None,
    own_trackers: Sequence[Tracker],
    resolved: Resolved,
) -> Trackers:
    """Start the trackers that options name, the dump of rollouts and, on rank 0, ``own_trackers``.

    ``found_step`` is the step of the checkpoint from which the run resumes.
    """
    resume_step = None if config.evaluation.val_only else found_step
    trackers: list[Tracker] = list(own_trackers) if strategy.is_main else []
    trackers += _rollout_trackers(config, strategy, resume_step)
    folders = {"save_path": config.logged_path, "dump_rollouts": config.dumped_path}
    options = {**flat_dict(config), **resolved.options, **folders}
    return start_trackers(
        config,
        strategy,
        headline,
        total_steps=total_steps,
        resume_step=resume_step,
        trackers=trackers,
        options=options,
    )


def _rollout_trackers(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, resume_step: int | None
) -> list[Tracker]:
    """Make this rank's writer of ``--dump_rollouts``; none without the option."""
    folder = config.dumped_path
    if folder is None:
        return []
    path = Path(folder)

    def prepare() -> None:
        if strategy.is_main:
            prepare_rollouts(path, resume_step)

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--dump_rollouts {folder}: cannot be written ({message}); choose another folder."
        )

    collective(strategy.comm, prepare, OSError, raised=failure)
    return [RolloutTracker(path, strategy.comm.rank, config.dump.dump_max_mib * 2**20)]
