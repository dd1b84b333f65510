"""Scored groups of asynchronous runs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from openppo.experience.scoring import begin_scoring
from openppo.rewards import Scorer
from openppo.rollout.failures import N_SHOWN
from openppo.rollout.players import PlayerParts
from openppo.sources.groups import GroupPlayer
from openppo.sources.schedule import Start
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Sample, StopCheck


@dataclass(frozen=True)
class Outcome:
    """Outcome of a group after ``seconds``.

    ``samples`` are scored; without any the group teaches nothing, and None stands for a failed group. ``failed``
    are stand-ins for some of its failed attempts.
    """

    number: int
    samples: list[Sample] | None
    metrics: Metrics
    error: str = ""
    failed: Sequence[Sample] = ()
    seconds: float = 0.0


class _Unscored(NamedTuple):
    """A group that waits for its scores."""

    samples: list[Sample]
    metrics: Metrics
    scored: asyncio.Future[list[Sample]]


@dataclass(eq=False)
class OutcomePlayer:
    """Plays groups of ``tasks`` one by one, scores them and drops those that teach nothing.

    ``scorer`` is None if trainers score, or none is needed; then trainers also drop groups. ``parts`` make the players
    of tasks that join.
    """

    tasks: dict[str, Task]
    player: GroupPlayer
    parts: PlayerParts
    scorer: Scorer | None
    trainers_score: bool = False
    is_scoring: bool = False
    _unscored: list[_Unscored] = field(default_factory=list)

    async def join(self, task: Task) -> None:
        """Add a task."""
        self.tasks[task.name] = task
        self.player.players[task.name] = task.player(self.parts)
        await self.player.start()

    async def play(self, start: Start) -> Outcome:
        """Play a group and score it."""
        begun = time.monotonic()
        task = self.tasks[start.task]
        group = task.group(
            task.prompt(start.index), start.index, number=start.number, attempts=1 + task.retries
        )
        (played,) = await self.player.play([group])

        metrics = Metrics()
        played.measure(metrics)
        if played.error is None:
            outcome = await self._scored(task, Outcome(start.number, played.samples, metrics))
        else:
            outcome = Outcome(start.number, None, metrics, error=played.error)
        seconds = time.monotonic() - begun
        return replace(outcome, failed=played.failures[:N_SHOWN], seconds=seconds)

    async def _scored(self, task: Task, outcome: Outcome) -> Outcome:
        """Score the samples of an outcome; leave out those of a group that teaches nothing."""
        assert outcome.samples is not None
        samples = await self._scores(outcome.samples, outcome.metrics)
        if task.most_in_vain == 0 or self.trainers_score:
            return replace(outcome, samples=samples)

        errors = [sample.reward_error for sample in samples if sample.reward_error is not None]
        if len(errors) == len(samples):
            return replace(outcome, samples=None, error=errors[0])
        return replace(outcome, samples=task.useful(samples))

    async def _scores(self, samples: list[Sample], metrics: Metrics) -> list[Sample]:
        """Score in the background; groups that wait meanwhile are scored together."""
        if self.scorer is None:
            return samples

        scored = asyncio.get_running_loop().create_future()
        self._unscored.append(_Unscored(samples, metrics, scored))
        while self._unscored and not self.is_scoring:
            self.is_scoring = True
            groups = self._unscored
            self._unscored = []
            try:
                together = [sample for group in groups for sample in group.samples]
                rollout = begin_scoring(self.scorer, together, StopCheck())
                await asyncio.to_thread(rollout.wait)
                current.progress()
            finally:
                self.is_scoring = False
            groups[0].metrics.merge(rollout.metrics)
            remaining = iter(rollout)
            for group in groups:
                group.scored.set_result(list(islice(remaining, len(group.samples))))
        return await scored
