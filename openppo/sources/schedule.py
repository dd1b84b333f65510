"""A schedule that gives each task its share of the accepted episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openppo import logger
from openppo.rollout.failures import GROUPS_IN_A_ROW, FailureCount, NothingTrainedError
from openppo.sources.progress import Ratios, TaskProgress
from openppo.tracking import Metrics


@dataclass(frozen=True)
class Start:
    """A group to be played, with its ``number`` in the run and ``index`` in its task."""

    number: int
    index: int
    task: str = ""


_SAVED = ("begun", "failed", "accepted", "ended", "rewards", "seconds")


@dataclass(eq=False)
class TaskSchedule:
    """Deficit round-robin: the next group is of the task furthest behind its ratio.

    Limits of tasks come first. Running episodes count as accepted, minus a task's usual number of running ones;
    otherwise tasks with long episodes would always look ahead. ``automatic`` sets new ratios at each step. The
    progress of ``mixed`` tasks is logged, that of a run's single task is not.
    """

    tasks: dict[str, TaskProgress]
    automatic: Ratios | None = None
    mixed: bool = False
    _again: list[Start] = field(default_factory=list)
    """Groups that were running when the checkpoint was written."""

    def next(self, number: int) -> Start | None:
        """Begin a group, with ``number`` unless it has one of a checkpoint; None without room."""
        if self._again:
            start = self._again.pop(0)
            self.tasks[start.task].begin_again()
            return start

        with_room = [name for name, task in self.tasks.items() if task.has_room]
        if not with_room:
            return None
        usual = self._usually_running()
        name = min(with_room, key=lambda name: self._lead(name, usual[name]))
        return Start(number, self.tasks[name].begin(), name)

    def accept(self, start: Start, rewards: Sequence[float], seconds: float) -> None:
        """Note that a group has ended, with rewards of its episodes, or none if it teaches nothing."""
        self.tasks[start.task].accept(rewards, seconds)

    def fail(self, start: Start, error: str) -> None:
        """Note that a group has failed; ``NothingTrainedError`` if no task is left."""
        task = self.tasks[start.task]
        task.fail(error)
        message = task.failures.groups_message(start.task)
        was_left_out = task.failures.groups > GROUPS_IN_A_ROW
        if message is None or was_left_out:
            return

        task.leave_out()
        ratios = {name: other.ratio for name, other in self._played().items() if other.ratio > 0}
        if not ratios:
            raise NothingTrainedError(message)
        self.set_ratios(ratios)
        shown = ", ".join(f"{name} {self.tasks[name].ratio:.3g}" for name in ratios)
        logger.warning("%s. It is played no more; the ratios are now: %s", message, shown)

    def take_back(self, start: Start, n_episodes: int) -> None:
        """Note that accepted episodes of a group turned out to be too old."""
        self.tasks[start.task].take_back(n_episodes)

    def set_ratios(self, ratios: Mapping[str, float], keep_deficit: bool = False) -> None:
        """Set the ratios, in any unit, of all tasks that are played.

        ``keep_deficit``: a task that is behind its ratio stays behind.
        """
        total = sum(ratios.values())
        counted = sum(task.counted for task in self.tasks.values())
        for name, task in self.tasks.items():
            lead = task.counted - task.ratio * counted
            ratio = ratios.get(name, 0.0) / total
            task.set_ratio(ratio, counted=lead if keep_deficit else 0.0)

    def set_ratio(self, name: str, ratio: float) -> None:
        """Set the ratio of one task, and scale those of the others."""
        others = {
            other: task.ratio
            for other, task in self.tasks.items()
            if other != name and task.ratio > 0
        }
        total = sum(others.values()) or 1.0
        scaled = {other: (1 - ratio) * old / total for other, old in others.items()}
        self.set_ratios({name: ratio} | scaled)

    def advance(self) -> None:
        """Note that a global step is trained, and set automatic ratios."""
        if self.automatic is not None:
            self.set_ratios(self.automatic(self._played()), keep_deficit=True)

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Change a task as ``TaskControl.change`` does; a ratio brings back a task that was left out."""
        task = self.tasks[name]
        if max_concurrent is not None:
            task.bound(max_concurrent)
        if ratio is not None:
            task.readmit()
            self.set_ratio(name, ratio)

    def join(self, name: str, progress: TaskProgress) -> None:
        """Add a task with its ratio, and scale those of the others."""
        self.tasks[name] = progress
        self.set_ratio(name, progress.ratio)

    def progress(self) -> dict[str, dict[str, float]]:
        """Return the numbers of each task's progress."""
        total = sum(task.accepted for task in self.tasks.values())
        return {name: task.progress(total) for name, task in self.tasks.items()}

    def measure(self, metrics: Metrics) -> None:
        """Add the progress of mixed tasks to ``metrics``."""
        if not self.mixed:
            return
        for name, numbers in self.progress().items():
            for key, value in numbers.items():
                metrics.add(f"task/{name}/{key}", value)

    def state_dict(self, running: Sequence[Start], lost: Mapping[Start, int]) -> dict[str, Any]:
        """Return the state as JSON; ``load_state_dict`` plays groups ``running`` and ``lost`` again.

        Those ``lost`` were accepted, with so many episodes.
        """
        again = sorted([*self._again, *running, *lost], key=lambda start: start.number)
        shares = {name: _saved(task) for name, task in self.tasks.items()}
        for start, n_episodes in lost.items():
            shares[start.task]["accepted"] -= n_episodes
        return {"shares": shares, "again": [vars(start) for start in again]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, but for ratios and limits, and bring back tasks that were left out."""
        missing = state["shares"].keys() - self.tasks.keys()
        if missing:
            raise ValueError(
                f"--tasks: the checkpoint has task {min(missing)}, which the file lacks: put it back."
            )

        for name, task in self.tasks.items():
            # A task that has joined since the checkpoint starts at 0.
            saved = state["shares"].get(name, dict.fromkeys(_SAVED, 0))
            self.tasks[name] = replace(
                task, **saved, running=0, counted=0, is_left_out=False, failures=FailureCount()
            )
        self._again = [Start(**start) for start in state["again"]]

    def _played(self) -> dict[str, TaskProgress]:
        """Tasks that are not left out."""
        return {name: task for name, task in self.tasks.items() if not task.is_left_out}

    def _usually_running(self) -> dict[str, float]:
        """Return how many of the running episodes each task has when all have their ratios.

        Its share of them is its share of the time.
        """
        known = [task.mean_seconds for task in self.tasks.values() if task.mean_seconds is not None]
        unknown = sum(known) / len(known) if known else 1.0
        times = {
            name: task.ratio * (task.mean_seconds or unknown) for name, task in self.tasks.items()
        }
        total_time = sum(times.values()) or 1.0
        n_running = sum(task.running * task.group_size for task in self.tasks.values())
        return {name: n_running * time / total_time for name, time in times.items()}

    def _lead(self, name: str, usual: float) -> float:
        """Episodes so far, minus the ``usual`` number of running ones, in units of the ratio.

        Half a group more, so that tasks with small groups are not put behind.
        """
        task = self.tasks[name]
        running = (task.running + 0.5) * task.group_size
        return (task.counted + running - usual) / task.ratio


def _saved(task: TaskProgress) -> dict[str, Any]:
    return {name: vars(task)[name] for name in _SAVED}
