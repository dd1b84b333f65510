"""Synchronous beside asynchronous training of agents that wait, on the same two cores, one thread per process.

    python benchmarks/async.py [--repeat 3] [--steps 6] [--write]

After each turn an episode waits for its environment: log-normal, median 300 ms, sigma 1. A second table is without
waits: there sampling and training only share the cores. The goal with waits, which are to be 60 % of a synchronous step
or more, is 1.8 times the speed. Runs take turns, ``--repeat`` times; shown are medians. The first and last steps of a
run do not count: in them the samplers' lead builds up and is used up.

What is compared are trained tokens per second, since asynchronous runs drop stale episodes. A rank that trains and
samples is idle while its engine has no requests; that it waits for another rank is not counted. Where ranks are apart,
the trainer is idle while it waits for a batch, and the sampler while its engine has no requests.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from agents import HEADS, SIZES, make_tokenizer
from peers.interleave import describe_machine, python_path, say, wait_until_idle, write_results
from transformers import LlamaConfig, LlamaForCausalLM

AGENT = """
import asyncio, math, random
async def solve(task, session):
    dice, messages, vowels = random.Random(task.seed), list(task.messages), 0
    for _ in range({turns}):
        answer = await session.chat(messages)
        vowels += sum(letter in "aeiou" for letter in answer.text)
        if {wait} > 0:
            await asyncio.sleep(dice.lognormvariate(math.log({wait}), 1.0))
        messages += [answer.message, {{"role": "user", "content": "".join(dice.choices("abcde", k=16))}}]
    return float(vowels)
"""
OPTIONS = """-m torch.distributed.run --standalone --nproc_per_node {ranks} -m openppo.cli.train_ppo --pretrain model
    --agent agent.py:solve --prompt_data prompts.jsonl --advantage_estimator group_norm --init_kl_coef 0
    --n_samples_per_prompt 4 --min_new_tokens {tokens} --generate_max_len {tokens} --max_turns {turns}
    --episode_max_len 4000 --rollout_batch_size {groups} --train_batch_size {samples} --micro_train_batch_size 4
    --num_episodes 1000 --max_steps {all_steps} --save_steps 100000 --engine_check off --save_path {saved}"""
EDGE = 3  # steps at each end of a run that do not count
WAIT = "async/wait_for_batch_s"
METRICS = WAIT, "async/engine_idle_share", "time/engine_idle_s", "stale/share"


@dataclass
class Run:
    """How a run is launched, by which other one it is measured, and what was measured in each repetition."""

    name: str
    ranks: int
    options: str = ""
    base: int = 0
    measured: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str, by: list[float] | None = None) -> float:
        """The median of a metric over repetitions, divided by what ``by`` says of each."""
        return statistics.median(
            map(float.__truediv__, self.measured[name], by or [1.0] * len(self.measured[name]))
        )

    def idle(self) -> str:
        """Shares of time in percent."""
        if not self.options:
            return f"{100 * self.median('time/engine_idle_s', self.measured['seconds']):.0f}"
        share, waits = 100 * self.median("async/engine_idle_share"), WAIT in self.measured
        trainer = 100 * self.median(WAIT, self.measured["seconds"]) if waits else 0.0
        return f"trainer {trainer:.0f}, sampler {share:.0f}" if waits else f"{share:.0f}"

    def measure(self, folder: Path, given: dict[str, Any]) -> None:
        """Run once, and keep means over its steps."""
        wait_until_idle()
        given = given | {"ranks": self.ranks, "saved": (saved := f"run{time.time_ns()}")}
        words = f"{OPTIONS} {self.options}".format_map(given).split()
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
        how = {"cwd": folder, "env": os.environ | own, "stderr": subprocess.STDOUT}
        ended = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False, **how
        )
        if ended.returncode != 0:
            sys.exit(f"{self.name} ended with status {ended.returncode}:\n{ended.stdout[-4000:]}")
        rows = [
            json.loads(line)
            for line in (folder / saved / "logs/metrics.jsonl").read_text().splitlines()
        ]
        counted = rows[EDGE:-EDGE]
        seconds = counted[-1]["time"] - rows[EDGE - 1]["time"]
        tokens = sum(
            row["speed/generation_tokens_per_s"] * row["time/generation_s"] for row in counted
        )
        found = {
            name: statistics.mean(row[name] for row in counted)
            for name in METRICS
            if name in rows[-1]
        }
        for name, value in {
            **found,
            "seconds": seconds / len(counted),
            "tokens_per_s": tokens / seconds,
        }.items():
            self.measured[name].append(value)
        say(f"  {self.name}: {tokens / seconds:.0f} tokens/s; load {os.getloadavg()[0]:.1f}")


def prepare(folder: Path) -> None:
    """A small random model with a tokenizer of characters, and prompts."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **SIZES, **HEADS, **ends)
    ).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text(
        "".join(f'{{"input": "{i:02d} write vowels"}}\n' for i in range(64))
    )


def table(runs: list[Run]) -> list[str]:
    """A row for each run."""
    head = ["", "s per step", "trained tokens/s", "times as fast", "idle, %", "stale episodes, %"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for run in runs:
        cells = [
            run.name,
            f"{run.median('seconds'):.2f}",
            f"{run.median('tokens_per_s'):.0f}",
            "",
            run.idle(),
            "",
        ]
        if run.options:
            cells[3] = f"{run.median('tokens_per_s', runs[run.base].measured['tokens_per_s']):.2f}"
            cells[5] = f"{100 * run.median('stale/share'):.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"Waiting is {runs[0].idle()} % of a synchronous step on 2 ranks, {runs[3].idle()} % on 1.",
        "",
    ]


def main() -> None:
    """Parse the command line, run, print and perhaps write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--waits", type=float, nargs="+", default=[0.3, 0.0], help="medians in seconds"
    )
    for name, default in {
        "turns": 4,
        "tokens": 6,
        "groups": 8,
        "max_staleness": 2,
        "steps": 6,
        "repeat": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--write", action="store_true", help="keep the tables in benchmarks/results"
    )
    arguments = parser.parse_args()
    given = vars(arguments) | {
        "all_steps": arguments.steps + 2 * EDGE,
        "samples": 4 * arguments.groups,
    }
    lines, ahead = list[str](), "--max_staleness {max_staleness}"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for wait in arguments.waits:
            say(f"median of waits {wait} s:")
            (Path(folder) / "agent.py").write_text(AGENT.format_map(given | {"wait": wait}))
            apart = Run("1 rank trains, 1 samples", 2, f"--rollout_ranks 1 {ahead}")
            runs = [Run("synchronous, 2 ranks", 2), apart, Run("overlapping, 2 ranks", 2, ahead)]
            runs += [
                Run("synchronous, 1 rank", 1, base=3),
                Run("overlapping, 1 rank", 1, ahead, base=3),
            ]
            for _ in range(arguments.repeat):
                for run in runs:
                    run.measure(Path(folder), given)
            lines += [
                f"## Waits of {1000 * wait:.0f} ms" if wait else "## Without waits",
                "",
                *table(runs),
            ]
    lines += describe_machine(
        {"Packages": {name: version(name) for name in ("torch", "transformers", "deepspeed")}}
    )
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("async", "Synchronous and asynchronous training of agents that wait", lines)


if __name__ == "__main__":
    main()
