"""``run_kills.py ARGUMENTS.json OUT RANDOM SAVING``: two ranks are killed so often, and each time resumed.

The ranks are forked from this process, which has imported everything, so that a session begins within a second.
Writes ``OUT/kills.json``: for each kill whom it hit, when, and what it hit in.
"""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from pathlib import Path

from run_cases import HANG_AFTER, PARTITION_EVERYTHING, SMALL_PIECES

from openppo.build.ppo import build_ppo_trainer
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy

FORK = multiprocessing.get_context("fork")
Ranks = list[multiprocessing.context.ForkProcess]


def session(rank: int, port: int, arguments: list[str], started: int) -> None:
    """One rank of one session; says by a byte that training starts."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    config = parse_options(TrainPPOConfig, arguments)
    trainer = build_ppo_trainer(
        config, DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    )
    os.write(started, b".")
    with SMALL_PIECES:
        trainer.fit()
    trainer.close()


def start(arguments: list[str]) -> tuple[Ranks, int]:
    """The processes of a new session, and a pipe that says when its ranks train."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    read, write = os.pipe()
    ranks = [FORK.Process(target=session, args=(rank, port, arguments, write)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    os.close(write)
    return ranks, read


def wait_for(checkpoints: Path, pattern: str, n_new: int, ranks: Ranks) -> None:
    """Until so many folders have come, a rank has ended, or a minute is over."""
    seen = before = set(checkpoints.glob(pattern))
    limit = time.monotonic() + 60
    while (
        len(seen - before) < n_new
        and time.monotonic() < limit
        and all(rank.is_alive() for rank in ranks)
    ):
        seen = seen | set(checkpoints.glob(pattern))
        time.sleep(0.0005)


def end(ranks: Ranks, killed: Ranks) -> list[int | None]:
    """Kill some ranks; the others notice, or are killed after a while. Returns the exit statuses of all."""
    for rank in killed:
        rank.kill()
    deadline = time.monotonic() + (20 if killed else 600)
    for rank in ranks:
        rank.join(deadline - time.monotonic())
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def main() -> None:
    """Kill at random moments of training, and of a save half written."""
    arguments, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    checkpoints, rng, kills = out / "model" / "checkpoints_ppo", random.Random(1), []
    kinds = ["random"] * int(sys.argv[3]) + ["while saving"] * int(sys.argv[4])
    rng.shuffle(kinds)
    for kind in kinds:
        ranks, started = start(arguments)
        heard = b""
        while len(heard) < 2 and (
            more := os.read(started, 2 - len(heard))
        ):  # until all train, or are gone
            heard += more
        if (
            kind == "random"
        ):  # counted in steps: a fast machine has as many kills in its run as a slow one
            wait_for(checkpoints, "step_*", rng.choice([0, 1, 2]), ranks)
            time.sleep(rng.uniform(0, 0.1))
        for _ in range(10 * (kind == "while saving")):  # until a save outlasts the wait
            wait_for(checkpoints, ".step_*.partial", 1, ranks)
            time.sleep(rng.uniform(0, 0.02))
            if list(checkpoints.glob(".step_*.partial")):
                break
        half = [path.name for path in checkpoints.glob(".step_*.partial")]
        statuses = end(ranks, rng.choice([ranks, ranks[:1], ranks[1:]]))
        os.close(started)
        found = sorted(path.name for path in checkpoints.glob("step_*"))
        kills.append({"kind": kind, "statuses": statuses, "half": half, "found": found})
        print(kills[-1], flush=True)
    ranks, _ = start(arguments)
    (out / "kills.json").write_text(json.dumps({"kills": kills, "last": end(ranks, [])}))


if __name__ == "__main__":
    main()
