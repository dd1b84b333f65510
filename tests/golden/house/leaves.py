"""Leaves of an observation by path, and how each is compared: exactly, closely or not at all."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
Leaves = dict[Path, Any]
EXACT, CLOSE, FREE = range(3)
LAST_BITS = {"rel_tol": 1e-5, "abs_tol": 1e-6}
"""Recordings that differ by no more differ in their last bits only."""
TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-5}
"""Such a leaf may differ by ten times as much from what is recorded: three recordings do not show the largest gap."""
BY_BITS = ("metrics", "samples", "shown", "weights", "outputs")
ORDER = "order"
SEPARATOR = " > "


def flatten(value: Any, path: Path = ()) -> Leaves:
    """Leaves by path. Lists of texts are sets, in a log multisets with an order, lists of numbers leaves."""
    if isinstance(value, dict) and value:
        return merged(flatten(each, (*path, name)) for name, each in value.items())
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return merged(flatten(each, (*path, str(number))) for number, each in enumerate(value))
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        numbers: Leaves = {(*path, text): number for text, number in Counter(value).items()}
        return numbers | {(*path, ORDER): value} if path[0] == "log" else numbers
    return {path: value}


def merged(parts: Iterable[Leaves]) -> Leaves:
    """One dictionary of several."""
    return {path: leaf for part in parts for path, leaf in part.items()}


def equal(one: Any, other: Any) -> bool:
    """Whether two leaves are the same bit for bit; NaN is like NaN, and 1 unlike 1.0."""
    return json.dumps(one) == json.dumps(other)


def close(one: Any, other: Any, tolerance: Mapping[str, float] = TOLERANCE) -> bool:
    """Whether two leaves differ in floats alone, and these by at most the tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, **tolerance) or equal(one, other)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(close(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return equal(one, other)


def classify(recordings: Sequence[Leaves]) -> dict[Path, int]:
    """How each leaf is compared, by what the recordings of one commit agree on.

    Agreement of three may be chance, so disagreement spreads: of one metric to all its steps; of other floats to all
    floats of the case; of sampled ids to all that follows from them. Invariants stand by themselves.
    """
    paths = {path: None for leaves in recordings for path in leaves}
    levels = {path: agreement([leaves.get(path, ...) for leaves in recordings]) for path in paths}
    unsteady = {
        path[-1] for path, level in levels.items() if path[0] == "metrics" and level == FREE
    }
    by_chance = any(
        level == FREE and path[0] in ("samples", "outputs") for path, level in levels.items()
    )
    last_bits = any(level != EXACT and path[0] in BY_BITS[1:] for path, level in levels.items())
    wholes = {
        place for path, level in levels.items() if level != EXACT and (place := counted_in(path))
    }
    for path in levels:
        if path[0] in BY_BITS and by_chance:
            levels[path] = FREE
        elif path[0] in BY_BITS and last_bits:
            levels[path] = max(levels[path], CLOSE)
        if path[0] == "metrics" and path[-1] in unsteady:
            levels[path] = FREE
        if last_bits and path[0] == "weights" and path[-1] == "checksum":
            levels[path] = FREE
        if counted_in(path) in wholes:
            levels[path] = FREE
    return levels


def counted_in(path: Path) -> Path | None:
    """The self-check or the histogram that a leaf is one line or bar of; unsteady ones may get others."""
    if path[0] == "log" and path[2] == "self-check":
        return path[:3]
    return path[:-1] if path[0] == "invariants" and len(path) == 5 else None


def agreement(values: Sequence[Any]) -> int:
    """The strictest comparison that all values stand; ``...`` is one that is missing."""
    if any(value is ... for value in values):
        return FREE
    if all(equal(values[0], value) for value in values):
        return EXACT
    return CLOSE if all(close(values[0], value, LAST_BITS) for value in values) else FREE


def prefixes(levels: Mapping[Path, int], level: int) -> list[str]:
    """Paths that are compared at ``level``, one for all that begin alike."""
    texts: list[str] = []

    def visit(prefix: Path, inside: Sequence[Path]) -> None:
        if all(levels[path] == level for path in inside):
            texts.append(SEPARATOR.join(prefix))
            return
        by_next: dict[str, list[Path]] = {}
        for path in (each for each in inside if len(each) > len(prefix)):
            by_next.setdefault(path[len(prefix)], []).append(path)
        for name, paths in by_next.items():
            visit((*prefix, name), paths)

    visit((), list(levels))
    return [text for text in texts if text]


def is_under(path: Path, places: Iterable[Path]) -> bool:
    """Whether the path begins with one of the places."""
    return any(path[: len(place)] == place for place in places)
