"""Seconds per PPO step of OpenPPO for 16 to 512 responses, on one process with two threads and on two with one each.

    python benchmarks/sweep.py [--workloads w1 w2] [--sizes 16 32 64 128 256 512] [--repeat 3] [--write]

Shows that cost grows linearly in responses, that two processes are no slower than one, and what a step costs outside
the models: "rest" is all that is not the engine's generation, a forward or a backward, so Python, DeepSpeed, collating,
the losses, logging and the optimizer's step, which is also shown by itself. The two setups take turns; models and
prompts are those of benchmarks/cpu_peers.py, with optimizer steps on 64 responses.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from peers.interleave import (
    CACHE,
    Entry,
    Participant,
    describe_machine,
    prepare_assets,
    say,
    write_results,
)
from peers.measure import Iteration, undisturbed

SETUPS = (("1 x 2", 1, 2), ("2 x 1", 2, 1))
MODEL_PARTS = ("part_generation", "part_forward", "part_backward")
WARM_UP = 2  # steps of the first size


def table(measured: dict[tuple[str, int], list[Iteration]], sizes: Sequence[int]) -> list[str]:
    """A row for each size: medians of both setups, what they are per response, and the rest of 1 x 2."""
    lines = [
        "| responses | tokens | 1 x 2, s | ms per response | 2 x 1, s | ms per response | (2 x 1) / (1 x 2) "
        "| rest of 1 x 2 | of it optimizer |",
        "| --- " * 9 + "|",
    ]
    for size in sizes:
        one, two = (_middle(measured[name, size]) for name, _, _ in SETUPS)
        rest = one["total"] - sum(one[part] for part in MODEL_PARTS)
        cells = [f"{size}", f"{one['tokens']:.0f}"]
        for setup in (one, two):
            cells += [f"{setup['total']:.2f}", f"{1000 * setup['total'] / size:.0f}"]
        cells += [f"{two['total'] / one['total']:.2f}", f"{rest / one['total']:.1%}"]
        cells.append(f"{one['part_optimizer'] / one['total']:.1%}")
        quiet = all(undisturbed(measured[name, size]) for name, _, _ in SETUPS)
        lines.append(f"| {' | '.join(cells)} |{'' if quiet else ' (disturbed)'}")
    return lines


def _middle(iterations: Sequence[Iteration]) -> Iteration:
    """The iteration with the median total, of those undisturbed if there are any."""
    used = sorted(undisturbed(iterations) or iterations, key=lambda iteration: iteration["total"])
    return used[(len(used) - 1) // 2]


def growth(measured: dict[tuple[str, int], list[Iteration]], sizes: Sequence[int]) -> str:
    """The straight line through the sizes of one process, and how far the medians are from it."""
    seconds = [_middle(measured["1 x 2", size])["total"] for size in sizes]
    slope, constant = statistics.linear_regression(sizes, seconds)
    off = max(abs(s - constant - slope * n) / s for n, s in zip(sizes, seconds, strict=True))
    line = f"1 x 2: {constant:.2f} s + {1000 * slope:.1f} ms per response"
    return f"{line}; no size is further than {off:.0%} from that line."


def sweep(workload: str, dtype: str, assets: Path, sizes: Sequence[int], repeat: int) -> list[str]:
    """Run both setups in turns and print what they say; the table's lines."""
    turns = [*[sizes[0]] * WARM_UP, *(size for size in sizes for _ in range(repeat))]
    running: list[Participant] = []
    measured: dict[tuple[str, int], list[Iteration]] = {}
    given = [
        "--assets",
        str(assets.resolve()),
        "--workload",
        workload,
        "--dtype",
        dtype,
        "--parts",
        "--sizes",
    ]
    try:
        for name, n_ranks, threads in SETUPS:
            participant = Participant(
                Entry(name, "openppo_step.py", n_ranks=n_ranks, threads=threads)
            )
            running.append(participant)
            participant.start(assets, [*given, *map(str, turns)])
            participant.wait_until_ready()
        for number, size in enumerate(turns):
            for participant in running:
                iteration = participant.turn()
                if number >= WARM_UP:
                    measured.setdefault((participant.entry.name, size), []).append(iteration)
                seconds, stall = iteration["total"], iteration["stall"]
                say(
                    f"  {participant.entry.name}: {size} responses {seconds:.2f} s stall {stall:.2f}"
                )
        for participant in running:
            participant.finish()
    finally:
        for participant in running:
            participant.stop()
    return [*table(measured, sizes), "", growth(measured, sizes)]


def main() -> None:
    """Parse the command line, run, print and perhaps write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=["w1", "w2"], default=["w1", "w2"])
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[16, 32, 64, 128, 256, 512],
        help="responses of a step",
    )
    parser.add_argument("--repeat", type=int, default=3, help="steps of each size")
    parser.add_argument(
        "--assets",
        type=Path,
        default=CACHE / "assets",
        help="models and prompts, built on first use",
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the tables in benchmarks/results"
    )
    arguments = parser.parse_args()
    prepare_assets(arguments.assets)
    lines: list[str] = []
    for workload in arguments.workloads:
        say(f"{workload.upper()} {arguments.dtype}:")
        rows = sweep(workload, arguments.dtype, arguments.assets, arguments.sizes, arguments.repeat)
        lines += [f"## {workload.upper()} {arguments.dtype}", "", *rows, ""]
    lines += describe_machine({})
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("sweep", "Seconds per step by responses, one and two processes", lines)


if __name__ == "__main__":
    main()
