"""Synchronous beside asynchronous training of agents that wait, on the same two cores, one thread per process.

    python benchmarks/async.py [--repeat 3] [--steps 12] [--write]

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
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from agents import HEADS, SIZES, make_tokenizer
from peers.interleave import REPOSITORY, cpu_seconds, describe_machine, say, wait_until_idle, write_results
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
OPTIONS = """--pretrain model --agent agent.py:solve --prompt_data prompts.jsonl --advantage_estimator group_norm
    --n_samples_per_prompt 4 --init_kl_coef 0 --min_new_tokens {tokens} --generate_max_len {tokens} --max_turns {turns}
    --episode_max_len 4000 --rollout_batch_size {groups} --train_batch_size {samples} --micro_train_batch_size 4
    --num_episodes 1000 --max_steps {all_steps} --save_steps 100000 --engine_check off --ckpt_path {saved}/checkpoints
    --save_path {saved}"""
EDGE = 3
"""Steps at each end of a run that do not count."""
IDLE = "async/engine_idle_share"


@dataclass
class Run:
    """How a run is launched, by which other one it is measured, and what was measured in each repetition."""

    name: str
    ranks: int
    options: str = ""
    base: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)

    def of_rows(self, name: str) -> list[float]:
        """A metric in each repetition."""
        return [row.get(name, 0.0) for row in self.rows]

    def median(self, name: str, by: list[float] | None = None) -> float:
        """The median of a metric over repetitions, divided by what ``by`` says of each."""
        return statistics.median(map(float.__truediv__, self.of_rows(name), by or [1.0] * len(self.rows)))

    def percent(self, name: str) -> str:
        """A share; of seconds, their share of a step."""
        return f"{100 * self.median(name, self.of_rows('seconds') if name.endswith('_s') else None):.0f}"

    def idle(self) -> str:
        """Shares of time, in percent."""
        if "--rollout_ranks" in self.options:
            return f"trainer {self.percent('async/wait_for_batch_s')}, sampler {self.percent(IDLE)}"
        return self.percent(IDLE if self.options else "agent/engine_idle_s")

    def measure(self, folder: Path, given: dict[str, int]) -> None:
        """Run once, and keep means over its steps."""
        wait_until_idle()
        launched = f"-m torch.distributed.run --standalone --nproc_per_node {self.ranks} -m openppo.cli.train_ppo"
        saved = f"run{time.time_ns()}"
        words = f"{launched} {OPTIONS} {self.options}".format_map({**given, "saved": saved}).split()
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
        before, began = cpu_seconds_of_others(), time.monotonic()
        how = {"cwd": folder, "env": os.environ | variables, "stderr": subprocess.STDOUT}
        ended = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False, **how)
        if ended.returncode != 0:
            sys.exit(f"{self.name} ended with status {ended.returncode}:\n{ended.stdout[-4000:]}")
        others = (cpu_seconds_of_others() - before) / (time.monotonic() - began)
        rows = [json.loads(line) for line in (folder / saved / "logs/metrics.jsonl").read_text().splitlines()]
        counted = rows[EDGE:-EDGE]
        seconds = counted[-1]["time"] - rows[EDGE - 1]["time"]
        tokens = sum(row["speed/generation_tokens_per_s"] * row["time/generation_s"] for row in counted)
        means = {name: statistics.mean(row.get(name, 0.0) for row in counted) for row in counted for name in row}
        own = {"seconds": seconds / len(counted), "tokens_per_s": tokens / seconds, "others": others}
        self.rows.append(means | own)
        say(f"  {self.name}: {own['tokens_per_s']:.0f} tokens/s; others used {others:.2f} cores")


def cpu_seconds_of_others() -> float:
    """CPU time of all processes but the runs so far."""
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_seconds() - ours.ru_utime - ours.ru_stime


def prepare(folder: Path) -> None:
    """A small random model with a tokenizer of characters, and prompts."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **HEADS, **ends)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(f'{{"input": "{i:02d} write vowels"}}\n' for i in range(64)))


def table(runs: list[Run], wait: float) -> list[str]:
    """A row for each run, and what else was measured."""
    head = ["", "s per step", "trained tokens/s", "times as fast", "idle, %", "stale episodes, %"]
    lines = [f"## {f'Waits of {1000 * wait:.0f} ms' if wait else 'Without waits'}", ""]
    lines += [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for run in runs:
        ratio = run.median("tokens_per_s", runs[run.base].of_rows("tokens_per_s"))
        faster, stale = (f"{ratio:.2f}", run.percent("stale/share")) if run.options else ("", "")
        cells = [
            run.name,
            f"{run.median('seconds'):.2f}",
            f"{run.median('tokens_per_s'):.0f}",
            faster,
            run.idle(),
            stale,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    waiting, others = [run.idle() for run in runs if not run.options], max(max(run.of_rows("others")) for run in runs)
    what = f"Waiting is {waiting[0]} % of a synchronous step on 2 ranks, {waiting[1]} % on 1"
    return [*lines, "", f"{what}. Other processes used at most {others:.2f} of {os.cpu_count()} cores in a run.", ""]


def main() -> None:
    """Parse the command line, run, print and perhaps write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.3, 0.0], help="medians in seconds")
    for name, default in {"turns": 4, "tokens": 8, "groups": 8, "max_staleness": 2, "steps": 12, "repeat": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/results")
    arguments = parser.parse_args()
    given = vars(arguments) | {"all_steps": arguments.steps + 2 * EDGE, "samples": 4 * arguments.groups}
    lines, ahead = list[str](), "--max_staleness {max_staleness}"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for wait in arguments.waits:
            say(f"median of waits {wait} s:")
            (Path(folder) / "agent.py").write_text(AGENT.format_map(given | {"wait": wait}))
            apart = Run("1 rank trains, 1 samples", 2, f"--rollout_ranks 1 {ahead}")
            runs = [Run("synchronous, 2 ranks", 2), apart, Run("overlapping, 2 ranks", 2, ahead)]
            runs += [Run("synchronous, 1 rank", 1, base=3), Run("overlapping, 1 rank", 1, ahead, base=3)]
            for _ in range(arguments.repeat):
                for run in runs:
                    run.measure(Path(folder), given)
            lines += table(runs, wait)
    lines += describe_machine({"Packages": {name: version(name) for name in ("torch", "transformers", "deepspeed")}})
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("async", "Synchronous and asynchronous training of agents that wait", lines)


if __name__ == "__main__":
    main()
