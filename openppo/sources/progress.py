"""Counters of a task while a run lasts, and functions of them that set the ratios of tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openppo.rollout.failures import FailureCount


@dataclass(eq=False)
class TaskProgress:
    """TaskProgress of a task.

    ``ratio`` is its share of accepted episodes; the ratios of all tasks sum to 1. ``max_concurrent`` bounds its running
    episodes. ``begun``, ``running`` and ``failed`` count groups, ``failures`` those that failed in a row. ``accepted``
    counts episodes; ``counted`` is that count, less the episodes that its earlier ratios entitled it to. ``rewards``
    and ``seconds`` are sums over episodes that have ``ended``, also if they were too old to train on.
    """

    ratio: float
    group_size: int
    max_concurrent: int | None = None
    begun: int = 0
    running: int = 0
    failed: int = 0
    failures: FailureCount = field(default_factory=FailureCount)
    accepted: int = 0
    counted: float = 0
    ended: int = 0
    rewards: float = 0.0
    seconds: float = 0.0
    is_left_out: bool = False

    def begin(self) -> int:
        """Note that a new group begins; return its index in the task."""
        self.begun += 1
        self.running += 1
        return self.begun - 1

    def begin_again(self) -> None:
        """Note that a group of a checkpoint begins again."""
        self.running += 1

    def accept(self, rewards: Sequence[float], seconds: float) -> None:
        """Note that a group has ended, with rewards of its episodes, or none if it teaches nothing."""
        n_episodes = len(rewards)
        self.running -= 1
        self.failures.add_group(None)
        self.accepted += n_episodes
        # A task that teaches nothing counts too; otherwise it would be played over and over.
        self.counted += n_episodes or self.group_size
        self.ended += n_episodes
        self.rewards += sum(rewards)
        self.seconds += seconds * n_episodes

    def fail(self, error: str) -> None:
        """Note that a group has failed."""
        self.running -= 1
        self.failed += 1
        self.failures.add_group(error)

    def take_back(self, n_episodes: int) -> None:
        """Note that accepted episodes turned out to be too old."""
        self.accepted -= n_episodes
        self.counted -= n_episodes

    def leave_out(self) -> None:
        """Play no more groups of the task."""
        self.is_left_out = True

    def readmit(self) -> None:
        """Play groups of the task again, after any number of failures."""
        self.failures = FailureCount()
        self.is_left_out = False

    def bound(self, max_concurrent: int) -> None:
        """Set another bound of running episodes."""
        self.max_concurrent = max_concurrent

    def set_ratio(self, ratio: float, counted: float) -> None:
        """Set the ratio, and the episodes that count as accepted under it."""
        self.ratio = ratio
        self.counted = counted

    @property
    def mean_seconds(self) -> float | None:
        """Mean duration of a group; None before the first has ended."""
        return self.seconds / self.ended if self.ended else None

    def progress(self, total: int) -> dict[str, float]:
        """Return the ratio, the share reached of ``total`` accepted episodes, and further numbers."""
        return {
            "ratio": self.ratio,
            "share": self.accepted / max(1, total),
            "accepted_episodes": self.accepted,
            "running_groups": self.running,
            "failed_groups": self.failed,
            "group_s": self.mean_seconds or 0.0,
        }

    @property
    def has_room(self) -> bool:
        """True if another group may begin."""
        if self.ratio <= 0 or self.is_left_out:
            return False
        if self.max_concurrent is None:
            return True
        n_episodes = (self.running + 1) * self.group_size
        return n_episodes <= max(self.max_concurrent, self.group_size)


Ratios = Callable[[Mapping[str, TaskProgress]], Mapping[str, float]]
"""Function of the tasks that are played to their new ratios, in any unit, called once per step."""


def by_success(tasks: Mapping[str, TaskProgress]) -> dict[str, float]:
    """Prefer tasks with little reward.

    The ratio is 1 less the mean reward, of rewards from 0 to 1, and at least 0.1.
    """
    ratios: dict[str, float] = {}
    for name, task in tasks.items():
        mean_reward = task.rewards / max(1, task.ended)
        ratios[name] = max(0.1, 1 - mean_reward)
    return ratios


def by_speed(tasks: Mapping[str, TaskProgress]) -> dict[str, float]:
    """Prefer fast tasks: the ratio is episodes per second, their mean before the first has ended."""
    known = [task.mean_seconds for task in tasks.values() if task.mean_seconds is not None]
    usual = sum(known) / len(known) if known else 1.0
    return {name: 1 / max(1e-3, task.mean_seconds or usual) for name, task in tasks.items()}


RATIOS: dict[str, Ratios] = {"success": by_success, "speed": by_speed}
"""Values of ``task_ratios`` besides functions of the user."""
