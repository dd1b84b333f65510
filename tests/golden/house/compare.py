"""Differences between what is recorded of a case and what it leaves now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.golden.house.leaves import (
    ORDER,
    SEPARATOR,
    Leaves,
    Path,
    close,
    equal,
    flatten,
    is_under,
)
from tests.golden.house.observe import Observation
from tests.golden.house.renames import Rename
from tests.golden.house.renaming import place_with_new_names, with_new_names, without_added


@dataclass(frozen=True)
class Recording:
    """One case at one commit: what it left, how its leaves are compared, and where it ran."""

    case: str
    commit: str
    kind: str
    """Of processor and libraries: other bits are expected on another."""
    inputs: str
    observation: Observation
    close: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """One leaf of a case that is another now; ``...`` stands for one that is missing."""

    case: str
    place: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.case}: {self.place}: recorded {shortened(self.recorded)}, now {shortened(self.now)}"


def shortened(leaf: Any) -> str:
    """The leaf's text, or its ends."""
    text = "nothing" if leaf is ... else repr(leaf)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-90:]}"


def differences(
    recording: Recording, now: Observation, renames: Sequence[Rename] = ()
) -> list[Difference]:
    """Leaves in which ``now`` differs from the recording, other than by the renames of its case."""
    of_case = [rename for rename in renames if applies(rename, recording.case)]
    then = flatten(with_new_names(recording.observation, of_case))
    free = [place_with_new_names(split(text), of_case) for text in recording.free]
    rounded = [place_with_new_names(split(text), of_case) for text in recording.close]
    unlike = []
    for path, one, other in pairs(then, flatten(without_added(now, of_case))):
        is_like = close if is_under(path, rounded) else equal
        if not is_under(path, free) and (one is ... or other is ... or not is_like(one, other)):
            unlike.append(Difference(recording.case, SEPARATOR.join(path), one, other))
    return unlike


def split(text: str) -> Path:
    """The path that a recording has as one text."""
    return tuple(text.split(SEPARATOR))


def pairs(then: Leaves, now: Leaves) -> Iterable[tuple[Path, Any, Any]]:
    """Leaves of both, of which one may be missing; the order of a log only if it has the same lines."""
    for path in [*then, *(path for path in now if path not in then)]:
        one, other = then.get(path, ...), now.get(path, ...)
        if path[0] == "log" and path[-1] == ORDER:
            if one is ... or other is ... or sorted(one) != sorted(other):
                continue
            one, other = first_moved(one, other)
        yield path, one, other


def first_moved(one: list[str], other: list[str]) -> tuple[str, str]:
    """The first two lines that differ; empty ones if none do."""
    return next(((a, b) for a, b in zip(one, other, strict=True) if a != b), ("", ""))


def applies(rename: Rename, case: str) -> bool:
    """Whether a rename is one of this case."""
    return not rename.cases or case in rename.cases


def unused(
    renames: Sequence[Rename],
    recordings: Sequence[Recording],
    now: Sequence[Observation] | None = None,
) -> list[Rename]:
    """Renames whose ``old`` no recording has, or whose ``new``, without an ``old``, no observation of now has."""

    def changes(rename: Rename) -> bool:
        then = [recording.observation for recording in recordings]
        change, observations = (
            (with_new_names, then) if rename.old is not None else (without_added, now or [])
        )
        cases = [recording.case for recording in recordings]
        return any(
            applies(rename, case) and change(each, [rename]) != each
            for case, each in zip(cases, observations, strict=False)
        )

    known = [rename for rename in renames if rename.old is not None or now is not None]
    return [rename for rename in known if not changes(rename)]
