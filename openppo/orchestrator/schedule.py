"""Which task the next group is of: given shares of the accepted episodes, as near as the tasks' limits allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openppo import logger
from openppo.rollout.failures import GROUPS_IN_A_ROW, FailureCount, NothingTrainedError
from openppo.rollout.tasks import Newcomer, Ratios, RunTask, TaskProgress, no_newcomer
from openppo.tracking import Metrics


@dataclass(frozen=True)
class Start:
    """A group to be played: its ``number`` in the run, and its place, ``index``, among those of its task."""

    number: int
    index: int
    task: str = ""


_SAVED = ("begun", "failed", "accepted", "ended", "rewards", "seconds")


@dataclass(eq=False)
class TaskSchedule:
    """Deficit round-robin: the next group is of the task whose accepted episodes are furthest behind its ratio.

    Those under way count as accepted, less the number that a task usually has under way: of long episodes there are
    always more, which must not be begun over and over, nor ever catch up. ``automatic`` sets ratios anew at each step,
    ``newcomer`` makes a task of what a program registers.
    """

    shares: dict[str, TaskProgress]
    automatic: Ratios | None = None
    newcomer: Newcomer = no_newcomer
    _again: list[Start] = field(default_factory=list)  # under way when the checkpoint was written

    def next(self, number: int) -> Start | None:
        """The group to begin, as the ``number``-th of the run unless it has its number; None if no task has room."""
        if self._again:
            start = self._again.pop(0)
            self.shares[start.task].running += 1
            return start
        free = [name for name, share in self.shares.items() if share.has_room]
        if not free:
            return None
        usual = self._usually_running()
        name = min(free, key=lambda name: self._progress(name, usual[name]))
        share = self.shares[name]
        share.begun, share.running = share.begun + 1, share.running + 1
        return Start(number, share.begun - 1, name)

    def accept(self, start: Start, rewards: Sequence[float], seconds: float) -> None:
        """A group has ended, with the rewards of its episodes; with none it teaches nothing."""
        share = self.shares[start.task]
        share.running -= 1
        share.failures.add_group(None)
        share.accepted += len(rewards)
        share.counted += (
            len(rewards) or share.group_size
        )  # else what teaches nothing would be played over and over
        share.ended, share.rewards = share.ended + len(rewards), share.rewards + sum(rewards)
        share.seconds += seconds * len(rewards)

    def fail(self, start: Start, error: str) -> None:
        """A group has failed; ``NothingTrainedError`` if that leaves no task."""
        share = self.shares[start.task]
        share.running, share.failed = share.running - 1, share.failed + 1
        share.failures.add_group(error)
        message = share.failures.groups_message(start.task)
        if message is None or share.failures.groups > GROUPS_IN_A_ROW:  # the latter were under way
            return
        share.is_left_out = True
        left = {
            name: each.ratio
            for name, each in self.shares.items()
            if each.ratio > 0 and not each.is_left_out
        }
        if not left:
            raise NothingTrainedError(message)
        self.set_ratios(left)
        ratios = ", ".join(f"{name} {self.shares[name].ratio:.3g}" for name in left)
        logger.warning("%s. It is played no more; the ratios are now: %s", message, ratios)

    def take_back(self, start: Start, n_episodes: int) -> None:
        """Accepted episodes of a group turned out to be too old."""
        share = self.shares[start.task]
        share.accepted, share.counted = share.accepted - n_episodes, share.counted - n_episodes

    def set_ratios(self, ratios: Mapping[str, float], goes_on: bool = False) -> None:
        """Ratios in any unit, of all tasks that are played; who is behind stays so if it ``goes_on``."""
        total, counted = sum(ratios.values()), sum(share.counted for share in self.shares.values())
        for name, share in self.shares.items():
            share.counted = goes_on * (share.counted - share.ratio * counted)
            share.ratio = ratios.get(name, 0.0) / total

    def set_ratio(self, name: str, ratio: float) -> None:
        """The ratio of one task; those of the others shrink or grow alike."""
        others = {
            other: share.ratio
            for other, share in self.shares.items()
            if other != name and share.ratio > 0
        }
        total = sum(others.values()) or 1.0
        self.set_ratios(
            {name: ratio} | {other: (1 - ratio) * each / total for other, each in others.items()}
        )

    def advance(self) -> None:
        """A global step is trained."""
        if self.automatic is not None:
            self.set_ratios(
                self.automatic({n: s for n, s in self.shares.items() if not s.is_left_out}),
                goes_on=True,
            )

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """As of ``TaskControl``; with a ratio, a task that was left out has another chance."""
        share = self.shares[name]
        share.max_concurrent = max_concurrent or share.max_concurrent
        if ratio is not None:
            share.failures, share.is_left_out = FailureCount(), False
            self.set_ratio(name, ratio)

    def join(self, task: RunTask) -> None:
        """Another task, with its ratio; those of the others shrink."""
        self.shares[task.name] = task.share
        self.set_ratio(task.name, task.ratio)

    def progress(self) -> dict[str, dict[str, float]]:
        """As of ``TaskControl``."""
        total = sum(share.accepted for share in self.shares.values())
        return {name: share.progress(total) for name, share in self.shares.items()}

    def measure(self, metrics: Metrics) -> None:
        """Progress of tasks with names as metrics."""
        for name, numbers in self.progress().items():
            for what, value in numbers.items() if name else ():
                metrics.add(f"task/{name}/{what}", value)

    def state_dict(self, running: Sequence[Start], lost: Mapping[Start, int]) -> dict[str, Any]:
        """What ``load_state_dict`` takes, as JSON; groups under way, and those ``lost``, are played again.

        Those lost were accepted, with so many episodes.
        """
        again = [
            vars(start)
            for start in sorted([*self._again, *running, *lost], key=lambda start: start.number)
        ]
        shares = {
            name: {each: vars(share)[each] for each in _SAVED}
            for name, share in self.shares.items()
        }
        for start, n_episodes in lost.items():
            shares[start.task]["accepted"] -= n_episodes
        return {"shares": shares, "again": again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state; ratios and limits are those of now, and each task has another chance."""
        if missing := state["shares"].keys() - self.shares.keys():
            raise ValueError(
                f"--tasks: the checkpoint has task {min(missing)}, which the file lacks: put it back."
            )
        for name, share in self.shares.items():  # one that has joined meanwhile begins anew
            saved = state["shares"].get(name, dict.fromkeys(_SAVED, 0))
            share = replace(share, **saved, running=0, counted=0, is_left_out=False)
            self.shares[name] = replace(share, failures=FailureCount())
        self._again = [Start(**start) for start in state["again"]]

    def _usually_running(self) -> dict[str, float]:
        """Of the episodes under way those of each task, if all have their ratios: as many as its share of the time."""
        seconds = {name: share.mean_seconds for name, share in self.shares.items()}
        known = [each for each in seconds.values() if each is not None]
        unknown = sum(known) / len(known) if known else 1.0
        times = {
            name: share.ratio * (seconds[name] or unknown) for name, share in self.shares.items()
        }
        total = sum(share.running * share.group_size for share in self.shares.values())
        return {name: total * time / (sum(times.values()) or 1.0) for name, time in times.items()}

    def _progress(self, name: str, usual: float) -> float:
        """Episodes so far, in units of the ratio; half a group more, so that small groups are no worse off."""
        share = self.shares[name]
        return (share.counted + (share.running + 0.5) * share.group_size - usual) / share.ratio
