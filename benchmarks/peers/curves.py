"""What ``benchmarks/learning.py`` makes of its runs: means and spreads over seeds, a table, and a picture as SVG."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 4  # rollouts
PARTS = {"1/4 of the samples": 0.25, "1/2": 0.5, "all": 1.0}
COLORS = ("#0b6e4f", "#d1495b", "#3d5a98", "#57b894", "#f08a9a")
Run = dict[str, Any]
"""``curve``: samples, seconds and reward of each rollout; ``heldout``: reward and KL of the policy at the end."""


def smooth(run: Run) -> list[float]:
    """At each rollout the mean reward of the last ``WINDOW``."""
    rewards = [point["reward"] for point in run["curve"]]
    return [statistics.mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]


def average(runs: Sequence[Run]) -> dict[str, list[float]]:
    """By rollout: samples, mean seconds, and of the smoothed rewards mean, least and greatest over the runs."""
    steps, rewards = (
        zip(*(run["curve"] for run in runs), strict=True),
        list(zip(*map(smooth, runs), strict=True)),
    )
    places = [
        (step[0]["samples"], statistics.mean(point["seconds"] for point in step)) for step in steps
    ]
    return {
        "samples": [samples for samples, _ in places],
        "seconds": [seconds for _, seconds in places],
        "mean": list(map(statistics.mean, rewards)),
        "least": list(map(min, rewards)),
        "most": list(map(max, rewards)),
    }


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 of one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def is_below(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether our mean is lower by more than the standard deviation of the difference of two seeds."""
    noise = math.hypot(deviation(ours), deviation(theirs))
    return statistics.mean(theirs) - statistics.mean(ours) > noise


def rewards(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Those of each seed, at parts of the samples and of held-out prompts."""
    curves = [smooth(run) for run in runs]
    found = {
        part: [curve[math.ceil(share * len(curve)) - 1] for curve in curves]
        for part, share in PARTS.items()
    }
    return found | {"held-out": [run["heldout"]["reward"] for run in runs]}


def table(by_name: Mapping[str, Sequence[Run]]) -> list[str]:
    """A row for each participant, and where OpenPPO is below a peer with the same algorithm, the name's last word."""
    columns = [*PARTS, "held-out", "KL to the start", "seconds"]
    lines = [f"| reward | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    found = {name: rewards(runs) for name, runs in by_name.items()}
    for name, runs in by_name.items():
        digits = 3 if max(map(abs, found[name]["all"])) < 2 else 2
        cells = [
            f"{statistics.mean(values):.{digits}f} ± {deviation(values):.{digits}f}"
            for values in found[name].values()
        ]
        kl = [run["heldout"]["kl"] for run in runs]
        cells.append(f"{statistics.mean(kl):.2f} ± {deviation(kl):.2f}")
        seconds = statistics.mean(run["curve"][-1]["seconds"] for run in runs)
        lines.append(f"| {' | '.join([name, *cells, f'{seconds:.0f}'])} |")
    pairs = [
        (a, b)
        for a in found
        for b in found
        if "OpenPPO" in a and "OpenPPO" not in b and a.split()[-1] == b.split()[-1]
    ]
    below = [
        f"{a} is below {b} at {part}."
        for a, b in pairs
        for part in found[a]
        if is_below(found[a][part], found[b][part])
    ]
    return [
        *lines,
        "",
        " ".join(below) or "OpenPPO is below no peer by more than the spread of the seeds.",
    ]


def draw(tasks: Mapping[str, Mapping[str, Sequence[Run]]]) -> str:
    """A row for each task: rewards by samples and by seconds. Lines are means, bands hold all seeds."""
    parts = ['<rect width="100%" height="100%" fill="white"/>']
    for i, name in enumerate(next(iter(tasks.values()))):
        parts.append(f'<rect x="{60 + 170 * i}" y="14" width="14" height="14" fill="{COLORS[i]}"/>')
        parts.append(f'<text x="{80 + 170 * i}" y="26">{name}</text>')
    for row, (task, by_name) in enumerate(tasks.items()):
        curves = [average(runs) for runs in by_name.values()]
        for column, unit in enumerate(("samples", "seconds")):
            parts.append(f'<g transform="translate({60 + 450 * column} {70 + 310 * row})">')
            parts.append(
                f'<text y="-8" font-weight="bold">{task}: mean reward of {WINDOW} rollouts, by {unit}</text>'
            )
            parts += [*panel(curves, unit), "</g>"]
    size = f'viewBox="0 0 910 {70 + 310 * len(tasks)}" font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>", ""])


def panel(
    curves: Sequence[dict[str, list[float]]], unit: str, wide: int = 380, high: int = 240
) -> list[str]:
    """A frame with axes and all curves."""
    low, top = min(min(c["least"]) for c in curves), max(max(c["most"]) for c in curves)
    end = max(curve[unit][-1] for curve in curves)
    parts = [f'<rect width="{wide}" height="{high}" fill="none" stroke="#999"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = f"{low + share * (top - low):.{2 if top < 2 else 0}f}"
        parts.append(
            f'<text x="{share * wide}" y="{high + 16}" text-anchor="middle">{share * end:,.0f}</text>'
        )
        parts.append(f'<text x="-6" y="{(1 - share) * high + 4}" text-anchor="end">{value}</text>')
    for curve, color in zip(curves, COLORS, strict=False):

        def points(key: str, curve: dict[str, list[float]] = curve) -> list[str]:
            places = zip(curve[unit], curve[key], strict=True)
            return [f"{wide * x / end:.1f},{high * (top - y) / (top - low):.1f}" for x, y in places]

        band = [*points("least"), *reversed(points("most"))]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{color}" fill-opacity="0.15"/>')
        parts.append(
            f'<polyline points="{" ".join(points("mean"))}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
    return parts
