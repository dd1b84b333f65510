"""Tokens per second of decoding 64 rows on two CPU cores: OpenPPO's engine, vLLM's CPU build, and ``generate``.

    python benchmarks/decode.py [--quick] [--write]

The same 64 prompts of each workload (benchmarks/peers/workload.py), sampled at temperature 1 with the log-probs of the
sampled tokens for OpenPPO and vLLM, and without for ``generate`` of transformers. The participants take turns as in
benchmarks/cpu_peers.py.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from peers.interleave import (
    CACHE,
    Entry,
    Rounds,
    describe_machine,
    prepare_assets,
    run_cell,
    say,
    write_results,
)
from peers.measure import Summary, decode_table

CELLS = {
    "w1-float32": "W1 float32",
    "w2-float32": "W2 float32",
    "w1-bf16": "W1 bf16",
    "w2-bf16": "W2 bf16",
}
QUICK_CELLS = ("w1-float32", "w2-float32")  # those with a target
ENTRIES = (
    Entry("OpenPPO", "local_decode.py"),
    Entry("vLLM 0.32.0", "vllm_decode.py", environment="vllm"),
    Entry("transformers generate", "local_decode.py", ("--engine", "transformers")),
)
FULL, QUICK = Rounds(2, 7, 7), Rounds(1, 3, 2)
QUICK_CELL_S = 90  # from loading on


def measure(
    assets: Path, environments: Path, quick: bool, cells: Sequence[str] = ()
) -> tuple[list[str], dict[str, dict[str, str]]]:
    """The table, and the participants' versions."""
    decoded: dict[str, list[Summary]] = {}
    versions: dict[str, dict[str, str]] = {}
    for cell in cells or (QUICK_CELLS if quick else CELLS):
        say(f"decoding {CELLS[cell]}:")
        rounds = QUICK if quick else FULL
        deadline = time.monotonic() + (QUICK_CELL_S if quick else float("inf"))
        workload, dtype = cell.split("-")
        given = ["--assets", str(assets.resolve()), "--workload", workload, "--dtype", dtype]
        timed = Rounds(rounds.warm_up, rounds.measured, rounds.extra, deadline)
        decoded[CELLS[cell]], used = run_cell(ENTRIES, given, environments, timed)
        versions |= {f"{name}, decoding": packages for name, packages in used.items()}
    return decode_table(decoded), versions


def main() -> None:
    """Parse the command line, run, print and perhaps write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="float32 only, one warm-up and three iterations each"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(CELLS), default=[])
    parser.add_argument(
        "--environments", type=Path, default=CACHE, help="the folder given to peers/setup.sh"
    )
    parser.add_argument(
        "--assets",
        type=Path,
        default=CACHE / "assets",
        help="models and prompts, built on first use",
    )
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    prepare_assets(arguments.assets)
    table, versions = measure(
        arguments.assets, arguments.environments, arguments.quick, arguments.workloads
    )
    lines = [*table, "", *describe_machine(versions)]
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("decode", "Decoding 64 rows on two CPU cores", lines)


if __name__ == "__main__":
    main()
