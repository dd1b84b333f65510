"""Signals at random moments of an agent's run: ``python -m tests.distributed.plant_signals FOLDER --moments 500``.

Each run trains a tiny model with programs of several processes, gets SIGINT, and must end with status 0 and one line,
and leave none of its programs. A run that does not end is aborted, and its output then has the stacks of its threads.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.distributed.runs import save_chat_model
from tests.fork_server import Launcher

SECONDS_UNTIL_IT_HANGS = 120
LONGEST_DELAY = 3.0
"""Seconds from the first program's start to the signal: a few steps."""
SAVES = "SIGINT: saving a checkpoint, then exiting"

RUN = """
import os, runpy, sys
open("pid", "w").write(str(os.getpid()))
sys.argv = ["train_ppo", *sys.argv[1:]]
runpy.run_module("openppo.cli.train_ppo", run_name="__main__")
"""
PROGRAM = """
import json, os, sys, urllib.request
open(sys.argv[1] + "/started", "w").close()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"reward": sum(letter.isupper() for letter in answer)}))
"""


def run_once(launcher: Launcher, model: Path, folder: Path, delay: float) -> tuple[str, str]:
    """How a run ended that got SIGINT so many seconds after its first program had started; and its output."""
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(RUN)
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "rows.jsonl").write_text("".join(f'{{"input": "say {i}"}}\n' for i in range(64)))
    flags = f"""--pretrain {model} --prompt_data rows.jsonl --save_path trained --advantage_estimator group_norm
        --n_samples_per_prompt 4 --rollout_batch_size 2 --train_batch_size 8 --generate_max_len 8 --save_steps 0
        --episode_max_len 160 --init_kl_coef 0 --num_episodes 100000"""
    command = f"{sys.executable} -S {folder}/agent.py {folder} | tee {folder}/answer"
    words = [folder / "run.py", *flags.split(), "--agent_command", command]

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(launcher.run, words, cwd=folder)
        while not (folder / "started").exists() and not ending.done():
            time.sleep(0.01)
        time.sleep(delay)
        pid = int((folder / "pid").read_text())
        abort = threading.Timer(SECONDS_UNTIL_IT_HANGS, os.kill, (pid, signal.SIGABRT))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        abort.start()
        ended = ending.result()
        hangs = not abort.is_alive()
        abort.cancel()

    if hangs:
        return "hung", ended.stdout
    if list(alive_programs(folder)):
        return "left programs", ended.stdout
    if ended.returncode != 0 or ended.stdout.count(SAVES) != 1:
        return f"ended with status {ended.returncode}", ended.stdout
    return "ended", ended.stdout


def alive_programs(folder: Path) -> Iterator[psutil.Process]:
    """Processes that name the folder, a moment after the run's end."""
    time.sleep(0.2)
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if (
                f"{folder}/" in str(process.info["cmdline"])
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process


def plant(folder: Path, moments: int, seed: int = 0, at_a_time: int = 1) -> Counter[str]:
    """How many of the runs ended how; output of those that did not end well lies in their folders."""
    launcher, generator = Launcher(), random.Random(seed)
    model = save_chat_model(folder / "model")
    delays = [generator.uniform(0, LONGEST_DELAY) for _ in range(moments)]
    folders = [folder / f"moment_{number}" for number in range(moments)]
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        runs = pool.map(partial(run_once, launcher, model), folders, delays)
        for path, delay, (outcome, output) in zip(folders, delays, runs, strict=True):
            counts[outcome] += 1
            if outcome == "ended":
                subprocess.run(["rm", "-r", str(path)], check=True)
            else:
                (path / "output").write_text(output)
                print(f"{path.name}, {delay:.3f} s: {outcome}", flush=True)
            if sum(counts.values()) % 50 == 0:
                print(dict(counts), flush=True)
    launcher.close()
    return counts


def main() -> None:
    """Plant the signals and print the counts; the exit status is 1 if one run did not end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at_a_time", type=int, default=2, help="runs; more than cores are a load")
    options = parser.parse_args()
    counts = plant(options.folder.resolve(), options.moments, options.seed, options.at_a_time)
    print(dict(counts))
    sys.exit(set(counts) != {"ended"})


if __name__ == "__main__":
    main()
