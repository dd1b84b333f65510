"""Bookkeeping of groups: how many may begin, and which make up the next batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openppo import logger
from openppo.rollout.kept import newest_version, oldest_version, without_old
from openppo.tracking import Metrics
from openppo.types import Sample

Group = list[Sample]
_OUTCOMES = ("trained", "filtered", "stale", "failed")
_MUCH = 0.05
"""Share of stale episodes that is worth a warning."""


@dataclass(eq=False)
class WorkBuffer:
    """Bookkeeping of groups by number; it has no thread.

    ``version`` counts the global steps trained, ``synced`` is the version that samplers have. Admission keeps samples
    from growing old (AReaL, arXiv 2505.24298, section 5.1); the check when a batch is cut guarantees their age.

    At every event each submitted group is in one place:
    ``submitted = trained + filtered + stale + failed + buffered + running``.
    """

    batch: int
    max_staleness: int
    stale: Literal["drop", "mask"] = "drop"
    version: int = 0
    synced: int = 0
    submitted: int = 0
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_OUTCOMES, 0)))
    running: set[int] = field(default_factory=set)
    buffered: dict[int, Group] = field(default_factory=dict)
    in_vain: int = 0
    """Groups filtered since the last complete one."""
    _lengths: list[tuple[int, bool]] = field(default_factory=list)
    """Tokens of each sample since ``measure``, and True if it was too old."""
    _has_warned: bool = False

    @property
    def accepted(self) -> int:
        """Number of groups that are trained on or, as far as is known, will be."""
        return self.counts["trained"] + len(self.buffered)

    def room(self) -> int:
        """Return how many groups may be submitted now."""
        most = (self.max_staleness + self.synced + 1) * self.batch
        return max(0, most - self.accepted - len(self.running))

    def submit(self, number: int) -> None:
        """Note that a group begins."""
        assert number not in self.running and number not in self.buffered, (
            f"group {number} has begun already"
        )
        self.running.add(number)
        self.submitted += 1
        self._check()

    def complete(self, number: int, group: Group) -> None:
        """Note that a group has ended; ``KeyError`` if it is not running."""
        self.running.remove(number)
        self.buffered[number] = group
        self.in_vain = 0
        self._check()

    def drop(self, number: int, outcome: Literal["filtered", "failed"]) -> None:
        """Note that a group has ended without anything to train on; ``KeyError`` if it is not running."""
        self.running.remove(number)
        self.counts[outcome] += 1
        if outcome == "filtered":
            self.in_vain += 1
        self._check()

    def advance(self, version: int) -> None:
        """Note that ``version`` global steps are trained."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version

    def sync(self, version: int) -> None:
        """Note that samplers have the weights of ``version``."""
        assert self.synced <= version <= self.version, (
            f"version {version} after {self.synced}, of {self.version}"
        )
        self.synced = version

    def drop_stale(self) -> dict[int, int]:
        """Drop complete samples that are too old; return their number by group.

        A group of which too few are left is dropped as a whole.
        """
        n_stale: dict[int, int] = {}
        oldest = self.version - self.max_staleness
        for number, group in list(self.buffered.items()):
            if not any(_is_old(sample, oldest) for sample in group):
                continue

            fresh = self._fresh_part(group, oldest)
            n_stale[number] = len(group) - len(fresh)
            if fresh:
                self.buffered[number] = fresh
            else:
                del self.buffered[number]
                self.counts["stale"] += 1
        self._check()
        return n_stale

    def cut(self, n_groups: int | None = None) -> list[Group] | None:
        """Take out complete groups of lowest numbers, a batch or ``n_groups``; None while too few are fresh enough."""
        n_groups = self.batch if n_groups is None else n_groups
        self.drop_stale()
        if len(self.buffered) < n_groups:
            return None

        numbers = sorted(self.buffered)[:n_groups]
        groups = [self.buffered.pop(number) for number in numbers]
        self.counts["trained"] += len(groups)
        for group in groups:
            self._lengths += [(_n_tokens(sample), False) for sample in group]
        self._check()
        return groups

    def give_back(self, n_groups: int) -> None:
        """Note that groups that were cut turned out to teach nothing."""
        self.counts["trained"] -= n_groups
        self.counts["filtered"] += n_groups
        self._check()

    def measure(self, metrics: Metrics) -> None:
        """Add counts of groups to ``metrics``, and the share of stale episodes since the last call."""
        for name in _OUTCOMES[1:]:
            metrics.add(f"async/{name}_groups", self.counts[name])
        metrics.add("async/buffered_groups", len(self.buffered))
        metrics.add("async/running_groups", len(self.running))

        lengths = sorted(self._lengths)
        self._lengths = []
        share = sum(is_old for _, is_old in lengths) / max(1, len(lengths))
        metrics.add("stale/share", share)
        if share > 0:
            _measure_by_length(lengths, metrics)

        if share >= _MUCH and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%.0f %% of the episodes were older than --max_staleness %d when they could have been trained on; "
                "the longest are lost first (stale/share_by_length): raise it.",
                100 * share,
                self.max_staleness,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return complete groups, and counters without running groups."""
        submitted = self.submitted - len(self.running)
        return {"submitted": submitted, "counts": dict(self.counts), "groups": dict(self.buffered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, in which no group is running; ``advance`` and ``sync`` follow."""
        self.submitted = state["submitted"]
        self.counts = Counter(state["counts"])
        self.running = set()
        self.buffered = dict(state["groups"])
        self.version = self.synced = self.counts["trained"] // self.batch
        self._check()

    def _fresh_part(self, group: Group, oldest: int) -> Group:
        """Return the fresh samples of a group; none if fewer than two of several are left."""
        fresh: Group = []
        for sample in group:
            if not _is_old(sample, oldest):
                fresh.append(sample)
            elif self.stale == "mask" and newest_version(sample) >= oldest:
                fresh.append(without_old(sample, oldest))
            else:
                self._lengths.append((_n_tokens(sample), True))

        return fresh if len(fresh) >= min(2, len(group)) else []

    def _check(self) -> None:
        placed = sum(self.counts.values()) + len(self.buffered) + len(self.running)
        assert self.submitted == placed, (
            f"{self.submitted} groups submitted, {placed} known: {self.counts}"
        )


def _is_old(sample: Sample, oldest: int) -> bool:
    """True if an action of a version before ``oldest`` would be trained on."""
    version = oldest_version(sample)
    return version is not None and version < oldest


def _n_tokens(sample: Sample) -> int:
    return sum(len(segment.token_ids) for segment in sample.segments)


def _measure_by_length(lengths: Sequence[tuple[int, bool]], metrics: Metrics) -> None:
    """Add the share of stale episodes by quarters of the sorted ``lengths``, (tokens, is stale).

    Episodes of equal length count alike, since a quarter may begin between them.
    """
    total = Counter(length for length, _ in lengths)
    stale = Counter(length for length, is_stale in lengths if is_stale)
    for i, (length, _) in enumerate(lengths):
        quarter = 1 + 4 * i // len(lengths)
        metrics.add(f"stale/share_by_length/{quarter}", stale[length] / total[length])
