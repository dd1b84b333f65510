"""Groups under way, complete and taken: how many may begin, and which make up the next batch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openppo import logger
from openppo.rollout.episodes import by_episode
from openppo.rollout.kept import oldest_version, without_old
from openppo.tracking import Metrics
from openppo.types import Trajectory

Group = list[Trajectory]
_OUTCOMES = ("trained", "filtered", "stale", "failed")
_MUCH = 0.05
"""Share of stale episodes that is worth a warning."""


@dataclass(eq=False)
class WorkBuffer:
    """Bookkeeping of groups by number; no thread of its own.

    ``version`` counts the global steps trained, ``synced`` is the version that samplers have. Admission keeps samples
    from growing old (AReaL, arXiv 2505.24298, section 5.1); the check when a batch is cut is what guarantees it. At
    every event each submitted group is in one place:
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
    """Groups filtered since one was complete."""
    _lengths: list[tuple[int, bool]] = field(default_factory=list)
    """Of each episode since ``measure``: its tokens, and whether it was too old."""
    _has_warned: bool = False

    @property
    def accepted(self) -> int:
        """Groups that are trained on or will be, as far as is known."""
        return self.counts["trained"] + len(self.buffered)

    def room(self) -> int:
        """Groups that may be submitted now."""
        most = (self.max_staleness + self.synced + 1) * self.batch
        return max(0, most - self.accepted - len(self.running))

    def submit(self, number: int) -> None:
        """A group begins."""
        assert number not in self.running and number not in self.buffered, (
            f"group {number} has begun already"
        )
        self.running.add(number)
        self.submitted += 1
        self._check()

    def complete(self, number: int, group: Group) -> None:
        """A group has ended; ``KeyError`` if it is not under way."""
        self.running.remove(number)
        self.buffered[number], self.in_vain = group, 0
        self._check()

    def drop(self, number: int, outcome: Literal["filtered", "failed"]) -> None:
        """A group has ended without anything to train on; ``KeyError`` as of ``complete``."""
        self.running.remove(number)
        self.counts[outcome] += 1
        self.in_vain += outcome == "filtered"
        self._check()

    def advance(self, version: int) -> None:
        """So many global steps are trained."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version

    def sync(self, version: int) -> None:
        """Samplers have these weights."""
        assert self.synced <= version <= self.version, (
            f"version {version} after {self.synced}, of {self.version}"
        )
        self.synced = version

    def cut(self) -> list[Group] | None:
        """The complete groups of lowest numbers, taken out; None as long as too few are fresh enough."""
        oldest = self.version - self.max_staleness
        for number, group in list(self.buffered.items()):
            if _is_old(group, oldest):
                fresh = self._fresh_part(group, oldest)
                if fresh:
                    self.buffered[number] = fresh
                else:
                    del self.buffered[number]
                    self.counts["stale"] += 1
        self._check()
        if len(self.buffered) < self.batch:
            return None
        numbers = sorted(self.buffered)[: self.batch]
        groups = [self.buffered.pop(number) for number in numbers]
        self.counts["trained"] += len(groups)
        self._lengths += [
            (sum(len(t.token_ids) for t in parts), False) for g in groups for parts in by_episode(g)
        ]
        self._check()
        return groups

    def measure(self, metrics: Metrics) -> None:
        """Where groups are, and which share of the episodes since the last call was too old, by length."""
        for name in _OUTCOMES[1:]:
            metrics.add(f"async/{name}_groups", self.counts[name])
        metrics.add("async/buffered_groups", len(self.buffered))
        metrics.add("async/running_groups", len(self.running))
        lengths, self._lengths = sorted(self._lengths), []
        share = sum(old for _, old in lengths) / max(1, len(lengths))
        metrics.add("stale/share", share)
        known, old = Counter(n for n, _ in lengths), Counter(n for n, is_old in lengths if is_old)
        for i, (length, _) in enumerate(
            lengths if share > 0 else ()
        ):  # a quarter may begin within one length
            metrics.add(
                f"stale/share_by_length/{1 + 4 * i // len(lengths)}", old[length] / known[length]
            )
        if share >= _MUCH and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%.0f %% of the episodes were older than --max_staleness %d when they could have been trained on; "
                "the longest are lost first (stale/share_by_length): raise it.",
                100 * share,
                self.max_staleness,
            )

    def state_dict(self) -> dict[str, Any]:
        """Complete groups, and counters without the groups under way."""
        submitted = self.submitted - len(self.running)
        return {"submitted": submitted, "counts": dict(self.counts), "groups": dict(self.buffered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state, in which nothing is under way; ``advance`` and ``sync`` follow."""
        self.submitted, self.counts = state["submitted"], Counter(state["counts"])
        self.running, self.buffered = set(), dict(state["groups"])
        self.version = self.synced = self.counts["trained"] // self.batch
        self._check()

    def _fresh_part(self, group: Group, oldest: int) -> Group:
        """What of a group is young enough; nothing if fewer than two episodes are left of several."""
        episodes, kept = by_episode(group), []
        for parts in episodes:
            if not _is_old(parts, oldest):
                kept.append(parts)
            elif self.stale == "mask" and any(max(part.versions) >= oldest for part in parts):
                kept.append([without_old(part, oldest) for part in parts])
            else:
                self._lengths.append((sum(len(t.token_ids) for t in parts), True))
        return (
            [part for parts in kept for part in parts] if len(kept) >= min(2, len(episodes)) else []
        )

    def _check(self) -> None:
        placed = sum(self.counts.values()) + len(self.buffered) + len(self.running)
        assert self.submitted == placed, (
            f"{self.submitted} groups submitted, {placed} known: {self.counts}"
        )


def _is_old(trajectories: Group, oldest: int) -> bool:
    """Whether losses would read an action of a version before ``oldest``."""
    versions = map(oldest_version, trajectories)
    return any(version is not None and version < oldest for version in versions)
