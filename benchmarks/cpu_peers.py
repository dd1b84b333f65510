"""One PPO iteration of OpenPPO, TRL and OpenRLHF 0.6.1 on two CPU cores, on the same models and prompts.

    bash benchmarks/peers/setup.sh                 # the peers' environments, once
    python benchmarks/cpu_peers.py --quick         # at most half an hour
    python benchmarks/cpu_peers.py --write         # the full run, kept in benchmarks/results
    python benchmarks/cpu_peers.py --workloads w3 w4        # groups
    python benchmarks/cpu_peers.py --workloads w5 --chat_model FOLDER   # groups of a real chat model
    python benchmarks/cpu_peers.py --only openppo --workloads w1-float32 --before ../old  # this checkout and another

64 prompts a batch, one response each, one optimizer step in micro-batches of 8, one process with two threads; the
workloads are described in benchmarks/peers/workload.py. The peers are OpenRLHF and TRL 1.12.0, the last with PPO.

W3 and W4 are groups without a critic beside the GRPOTrainer of TRL 1.16.0: 8 prompts of 256 tokens (W4: 64) with 8
responses of 64 (128) each; "kl" with a KL loss. W5 asks a real chat model (SmolLM2-135M-Instruct) for 8 sums, with 8
responses of at most 24 tokens. TRL runs in several micro-batches. "micro-batches of 4" and "separate rows" are OpenPPO
with --micro_train_batch_size 4 and with --share_prompts off.

Every participant is a process of its own that has loaded everything; in turns each runs one iteration, so that all see
the same machine. An iteration during which other processes were at work (the bounds are in benchmarks/peers/measure.py)
is discarded and repeated. Shown are medians, ratios of a peer's median iteration to OpenPPO's, and whether they reach
the targets. OpenPPO runs with its defaults, the peers with the fastest settings that we found: TRL samples in batches
of 64, on W2 also in batches of 8 and the faster counts; OpenRLHF in batches of 8.
"""

import argparse
import time
from pathlib import Path

import decode
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
from peers.measure import STALL_BOUND, ratio_table, same_numbers, speed_table

CELLS = {
    **{"w1-float32": "W1 float32", "w1-bf16": "W1 bf16", "w2-float32": "W2 float32"},
    **{
        f"{w}-{kind}": f"{w.upper()} {kind}"
        for w in ("w3", "w4")
        for kind in ("float32", "bf16", "float32-kl")
    },
    **{f"w5-{kind}": f"W5 {kind}" for kind in ("float32", "bf16")},
}
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PARTICIPANTS = ("openppo", "openppo-compile", "trl", "openrlhf")
FULL, QUICK = Rounds(2, 7, 7), Rounds(1, 3, 1)
LONG = Rounds(1, 3, 3)  # iterations of half a minute
QUICK_CELL_S = 230  # from loading on


def entries(cell: str, only: list[str], quick: bool) -> list[Entry]:
    """The participants of a cell."""
    if cell[:2] in ("w3", "w4", "w5"):
        return group_entries(cell, only, quick)
    openrlhf = Entry("OpenRLHF 0.6.1", "openrlhf_step.py", environment="openrlhf")
    found = {
        "openppo": [Entry("OpenPPO", "openppo_step.py")],
        "openppo-compile": [Entry("OpenPPO --compile", "openppo_step.py", ("--compile",))],
        "trl": [Entry("TRL 1.12.0", "trl_step.py", environment="trl")],
        "openrlhf": [openrlhf],
    }
    if (
        cell == "w2-float32"
    ):  # at 64 its padding follows the longest response, at 8 it decodes eight times
        by_eight = Entry("TRL 1.12.0 (rollout 8)", "trl_step.py", ("--rollout_micro", "8"), "trl")
        found["trl"] = [by_eight] if quick else [by_eight, *found["trl"]]
    return [entry for name in only for entry in found[name]]


def group_entries(cell: str, only: list[str], quick: bool) -> list[Entry]:
    """The participants of a cell with groups."""
    sizes = (8, 32) if quick else (8, 16, 32, 64)
    if cell[:2] == "w5":  # TRL is slower with more, and in float32 takes 10 GB with 64
        sizes = (8,) if quick else (8, 16)
    trl = [
        Entry(f"TRL 1.16.0 (micro {n})", "trl_grpo_step.py", ("--micro", str(n)), "trl-grpo")
        for n in sizes
    ]
    ours = [
        Entry("OpenPPO", "openppo_step.py", ("--micro", "0")),
        Entry("micro-batches of 4", "openppo_step.py", ("--micro", "4")),
    ]
    if cell[:2] != "w5":
        flags = ("--micro", "0", "--share_prompts", "off")
        ours.append(Entry("separate rows", "openppo_step.py", flags))
    groups = {"openppo": ours, "trl": trl}
    return [entry for name in only for entry in groups.get(name, [])]


def main() -> None:
    """Parse the command line, run, print and perhaps write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one warm-up and at most three iterations each"
    )
    parser.add_argument("--only", nargs="+", choices=PARTICIPANTS, default=list(PARTICIPANTS))
    parser.add_argument(
        "--before", type=Path, help="another checkout of OpenPPO, which takes turns with this one"
    )
    several = {name[:2] for name in CELLS}  # w3: all of its cells
    names = [*CELLS, "decode", *sorted(several)]
    parser.add_argument("--workloads", nargs="+", choices=names, default=[*CELLS, "decode"])
    parser.add_argument(
        "--environments", type=Path, default=CACHE, help="the folder given to peers/setup.sh"
    )
    parser.add_argument(
        "--assets",
        type=Path,
        default=CACHE / "assets",
        help="models and prompts, built on first use",
    )
    parser.add_argument(
        "--chat_model", default=CHAT_MODEL, help="name or folder of the model of W5"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the tables in benchmarks/results"
    )
    arguments = parser.parse_args()
    prepare_assets(arguments.assets)

    lines: list[str] = []
    versions: dict[str, dict[str, str]] = {}
    for cell in (cell for cell in CELLS if {cell, cell[:2]} & set(arguments.workloads)):
        say(f"{CELLS[cell]}:")
        full = LONG if cell[:2] == "w5" else FULL
        rounds = QUICK if arguments.quick else full
        deadline = time.monotonic() + (QUICK_CELL_S if arguments.quick else float("inf"))
        workload, dtype, *kl = cell.split("-")
        given = [
            "--assets",
            str(arguments.assets.resolve()),
            "--workload",
            workload,
            "--dtype",
            dtype,
            "--chat_model",
            arguments.chat_model,
        ]
        given += ["--kl", "0.04"] if kl else []
        taking_part = entries(cell, arguments.only, arguments.quick)
        if arguments.before is not None:
            taking_part.append(
                Entry("OpenPPO before", "openppo_step.py", checkout=arguments.before.resolve())
            )
        summaries, used = run_cell(
            taking_part,
            given,
            arguments.environments,
            Rounds(rounds.warm_up, rounds.measured, rounds.extra, deadline),
        )
        versions |= used
        if summaries:
            lines += [
                f"## {CELLS[cell]}",
                "",
                *speed_table(summaries),
                "",
                *ratio_table(CELLS[cell], summaries),
                "",
            ]
            lines += same_numbers(summaries)
    if "decode" in arguments.workloads:
        table, used = decode.measure(arguments.assets, arguments.environments, arguments.quick)
        lines += ["## Decoding", "", *table, ""]
        versions |= used
    lines += [
        "Medians of the iterations kept, each column its own; discarded are those in which other processes stalled it "
        f"for more than {STALL_BOUND:.0%} of its time. In brackets: none was quiet.",
        "",
        *describe_machine(versions),
    ]
    say("\n" + "\n".join(lines))
    if arguments.write and all(name[:2] in ("w3", "w4", "w5") for name in arguments.workloads):
        write_results("cpu-groups", "Groups on two CPU cores, beside TRL's GRPO", lines)
    elif arguments.write:
        write_results("cpu-peers", "PPO on two CPU cores, beside TRL and OpenRLHF", lines)


if __name__ == "__main__":
    main()
