"""Whatever fails on one rank ends all of them, with one report that says where and why.

From the fault on, ``--heartbeat_timeout`` and 15 s may pass until all ranks have ended: 60 s by default. Tests print
lines ``FAULT name, n ranks report SECONDS ended SECONDS``: ``pytest -rP | grep ^FAULT`` makes a table.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openppo.config import RunConfig

HERE = Path(__file__).parent
REPO = HERE.parents[1]
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 900  # other tests run beside it
REPORT = "OpenPPO: the run has failed"
SECONDS_TO_END_AFTER_IT_IS_KNOWN = 15  # as --heartbeat_timeout promises
Run = Callable[..., "Ended"]


@dataclass
class Ended:
    """A run that was launched, until all of its processes had ended."""

    output: str
    status: int
    times: list[tuple[float, str]]
    """When each line came."""
    words: list[str]
    """The command."""
    left: float
    """When the last process had ended."""

    @property
    def report(self) -> str:
        """The one report; fails if there are more or none."""
        parts = re.split(rf"^=+ {REPORT} =+$", self.output, flags=re.MULTILINE)
        assert len(parts) == 2, f"{len(parts) - 1} reports:\n{self.output}"
        return re.split(r"^={100}$", parts[1], maxsplit=1, flags=re.MULTILINE)[0]

    def row(self, name: str) -> str:
        """The lines of the report that start with ``name:``."""
        return "\n".join(line for line in self.report.splitlines() if line.startswith(f"{name}:"))

    def is_in_time(self, name: str) -> None:
        """Whether the report came, and all ranks had ended, as soon as the options promise; prints when."""
        planted = [float(line.split()[-1]) for _, line in self.times if line.startswith("fault at")][-1]
        reported = next(when for when, line in self.times if REPORT in line) - planted
        ended = self.left - planted
        print(f"\nFAULT {name}, 2 ranks report {reported:.1f} ended {ended:.1f}")
        promised = self._seconds("heartbeat_timeout") + SECONDS_TO_END_AFTER_IT_IS_KNOWN
        if "made no progress" in self.row("fault"):
            promised += self._seconds("stall_timeout")
        assert reported <= ended <= promised, self.output

    def _seconds(self, option: str) -> float:
        flag = f"--{option}"
        given = self.words[self.words.index(flag) + 1] if flag in self.words else getattr(RunConfig, option)
        return float(given)


def children() -> dict[int, list[int]]:
    """The processes that each process has started, by id."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(stat.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    started, found = children(), [pid]
    for one in found:
        found += started.get(one, [])
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


OnLine = Callable[[str, "subprocess.Popen[str]"], None]


def launch_and_watch(
    script: str, *arguments: object, cwd: Path, launcher: str = "", on_line: OnLine | None = None
) -> Ended:
    """Run a script on two ranks; ``on_line`` sees each line."""
    torchrun = "torch.distributed.run --standalone --nproc_per_node 2"
    start = launcher if launcher.startswith("deepspeed") else f"{torchrun} {launcher}"
    return watch([sys.executable, "-m", *start.split(), str(HERE / script), *map(str, arguments)], cwd, on_line)


def watch(words: list[str], cwd: Path, on_line: OnLine | None = None, **variables: object) -> Ended:
    """Run a command until its processes have ended; ``on_line`` sees each line. Fails if one of them is left over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    process = subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    family: set[int] = set()
    timer = threading.Timer(SECONDS_UNTIL_A_HANG_IS_CERTAIN, lambda: [os.kill(p, signal.SIGKILL) for p in family])
    timer.daemon = True
    timer.start()
    times: list[tuple[float, str]] = []
    assert process.stdout is not None
    for line in process.stdout:  # until all processes that have it have ended
        times.append((time.time(), line))
        family |= {process.pid, *descendants(process.pid)}
        if on_line is not None:
            on_line(line, process)
    status = process.wait()
    hung = not timer.is_alive()
    timer.cancel()
    output = "".join(line for _, line in times)
    assert not hung, f"did not end within {SECONDS_UNTIL_A_HANG_IS_CERTAIN} s:\n{output}"
    deadline = time.monotonic() + 10  # a process closes its output a little before it has ended
    while (left := [pid for pid in family if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], output
    return Ended(output, status, times, words, time.time())


def small_ppo(tiny: Path, folder: Path) -> list[str]:
    return f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 8
        --micro_train_batch_size 2 --micro_rollout_batch_size 4 --generate_max_len 8 --save_path {folder}/model
        """.split()


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Iterator[Run]:
    """``run("kill", 1, "generation", 2, "--zero_stage 3")``: a run with that fault, which must fail as promised.

    ``name`` is for the table, where the fault is in a reward function.
    """

    def run_with(fault: str, rank: int, phase: str, step: int, options: str, name: str = "") -> Ended:
        place = (fault, rank, phase, step, "train_ppo")
        reward = [] if "--reward_fn" in options else ["--reward_pretrain", str(tiny / "reward")]
        arguments = [*small_ppo(tiny, tmp_path), *reward, *options.split()]
        ended = launch_and_watch("run_faults.py", *place, *arguments, cwd=tmp_path)
        assert ended.status != 0
        ended.is_in_time(name or f"{fault} of rank {rank} in {phase}")
        return ended

    yield run_with


def step_in_words(step: int) -> str:
    return f"step {step}" if step else "before the first step"


@pytest.mark.parametrize(
    ("rank", "phase", "step", "options"),
    [
        (1, "loading", 0, "--zero_stage 3"),
        (1, "generation", 2, "--zero_stage 3"),
        (0, "generation", 1, "--zero_stage 2"),
        (1, "scoring", 1, "--zero_stage 3"),
        (0, "experience", 2, "--zero_stage 3"),
        (1, "training", 2, "--zero_stage 3"),
        (0, "training", 1, "--zero_stage 2"),
        (1, "saving", 3, "--zero_stage 3"),
    ],
)
def test_a_rank_that_is_killed_is_named_with_phase_and_step(
    run: Run, rank: int, phase: str, step: int, options: str
) -> None:
    ended = run("kill", rank, phase, step, options)
    assert f"rank {rank} is gone: its process has ended" in ended.row("fault")
    assert f"rank {rank}: phase {phase}, {step_in_words(step)}" in ended.row("where")
    assert f"rank {1 - rank}:" in ended.row("others")
    assert "-9 SIGKILL" in ended.row("look at")
    assert "SIGTERM:" not in ended.output, "that torchrun ends the others is no operator's signal"


def test_a_killed_rank_of_supervised_training_is_named(tiny: Path, tmp_path: Path) -> None:
    arguments = f"""--pretrain {tiny}/reward --dataset {tiny}/preference.jsonl --prompt_key prompt --train_batch_size 4
        --micro_train_batch_size 1 --zero_stage 3 --save_path {tmp_path}/model"""
    ended = launch_and_watch("run_faults.py", "kill", 1, "step", 2, "train_rm", *arguments.split(), cwd=tmp_path)
    assert ended.status != 0
    ended.is_in_time("kill of rank 1 in a step of train_rm")
    assert "rank 1 is gone: its process has ended" in ended.row("fault")
    assert "rank 1: phase step, step 2" in ended.row("where")


@pytest.mark.parametrize("rank", [0, 1])
def test_without_torchrun_the_store_may_go_with_rank_0(tiny: Path, tmp_path: Path, rank: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launcher = f"deepspeed.launcher.runner --num_gpus 2 --master_port {probe.getsockname()[1]}"
    options = [*small_ppo(tiny, tmp_path), "--reward_pretrain", tiny / "reward"]
    place = ("kill", rank, "training", 1, "train_ppo", *options)
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, launcher=launcher)
    assert ended.status != 0
    assert f"rank {rank} is gone: its process has ended" in ended.row("fault")
    assert f"rank {rank}: phase training, step 1" in ended.row("where")
    ended.is_in_time(f"kill of rank {rank} in training without torchrun")


def test_a_rank_that_crashes_in_c_leaves_its_stack(run: Run) -> None:
    ended = run("segfault", 1, "training", 1, "--zero_stage 3")
    assert "rank 1 is gone" in ended.row("fault")
    assert "rank 1: phase training, step 1" in ended.row("where")
    assert "Segmentation fault" in ended.report
    assert "in string_at" in ended.report


@pytest.mark.parametrize(
    ("rank", "phase", "step"), [(1, "loading", 0), (0, "loading", 0), (1, "generation", 2), (0, "training", 1)]
)
def test_an_exception_on_one_rank_is_reported_with_its_traceback(run: Run, rank: int, phase: str, step: int) -> None:
    ended = run("raise", rank, phase, step, "--zero_stage 3")
    assert f"rank {rank} raised RuntimeError: planted" in ended.row("fault")
    assert f"rank {rank}: phase {phase}, {step_in_words(step)}" in ended.row("where")
    assert 'raise RuntimeError("planted")' in ended.report
    assert "gloo" not in ended.report, "the cause, not its consequences"


@pytest.mark.parametrize(
    ("rank", "says"), [(0, "error: --pretrain: planted"), (1, "error on rank 1: --pretrain: planted")]
)
def test_a_mistake_that_one_rank_finds_stays_one_line(tiny: Path, tmp_path: Path, rank: int, says: str) -> None:
    options = [*small_ppo(tiny, tmp_path), "--reward_pretrain", tiny / "reward"]
    ended = launch_and_watch("run_faults.py", "refuse", rank, "loading", 0, "train_ppo", *options, cwd=tmp_path)
    assert [line for line in ended.output.splitlines() if line.startswith("error")] == [says]
    assert REPORT not in ended.output
    assert re.findall(r"exitcode  : (\d+)", ended.output) == ["2", "2"]


@pytest.mark.parametrize("fault", ["sleep", "hold", "stop"])
def test_a_rank_without_progress_or_sign_of_life_is_named(run: Run, fault: str) -> None:
    ended = run(fault, 1, "experience", 1, "--zero_stage 3 --heartbeat_timeout 8 --stall_timeout 10")
    assert "rank 1: phase experience, step 1" in ended.row("where")
    assert "rank 1 " in ended.row("fault")
    assert ("made no progress" if fault == "sleep" else "no sign of life") in ended.row("fault")
    if fault != "stop":  # a stopped process cannot say where it is
        assert f"in {fault}" in ended.report, "the function in which it stands"


def test_out_of_memory_is_reported_with_sizes_and_flags(run: Run) -> None:
    ended = run("exhaust", 1, "training", 1, "--zero_stage 3")
    assert "can't allocate memory" in ended.row("fault")
    assert "rank 1: phase training, step 1" in ended.row("where")
    memory = ended.row("memory")
    assert re.search(r"process \d+\.\d+ GiB, machine \d+\.\d+ GiB available of \d+\.\d+ GiB", memory)
    assert "address space of the process limited to" in memory
    assert "--micro_train_batch_size 2" in memory
    for role in ("actor", "critic", "reference", "reward model"):
        assert re.search(rf"^memory:\s+{role}\s+\d+ MiB", memory, flags=re.MULTILINE), memory
    assert "--gradient_checkpointing" in ended.row("lower")
    assert ended.output.count("estimated memory on each of 2 ranks: reward model ") == 1, "rank 0 says it at the start"
    assert "--zero_stage 3" not in ended.row("lower"), "the run has it already"


REWARDS = {
    "sync": "def reward_fn(response):\n    return fail(0.0)\n",
    "async": "async def reward_fn(response):\n    return fail(0.0)\n",
    "batch": "def reward_fn(responses):\n    return fail([0.0] * len(responses))\n",
}
RAISES = """
import os, time

def fail(score):
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
        print(f"fault at {time.time()}", flush=True)
        raise LookupError("no such answer")
    return score
"""


@pytest.mark.parametrize("form", REWARDS)
def test_a_reward_function_that_raises_on_one_rank_is_reported(run: Run, form: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(RAISES + REWARDS[form])
    name = f"{form} reward function raises on rank 1"
    ended = run("none", 0, "", 0, "--zero_stage 3 --reward_fn reward.py", name)
    assert "rank 1 raised RuntimeError: --reward_fn reward.py raised LookupError" in ended.row("fault")
    assert "rank 1: phase scoring, step 1" in ended.row("where")
    assert "in fail" in ended.report


def test_a_reward_function_that_raises_in_an_evaluation_of_the_average_is_reported(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    """The weights are swapped back by all ranks before one of them can fail."""
    (tmp_path / "reward.py").write_text(RAISES + REWARDS["batch"])
    evaluation = f"--enable_ema --eval_before_training --eval_data {tiny}/prompts.jsonl"
    ended = run("none", 0, "", 0, f"--zero_stage 3 --reward_fn reward.py {evaluation}", "evaluation raises on rank 1")
    assert "rank 1 raised RuntimeError: --reward_fn reward.py raised LookupError" in ended.row("fault")
    assert "rank 1: phase evaluation" in ended.row("where")


SLEEPS = """
import os, time

def reward_fn(responses):
    if os.environ["RANK"] == "0":
        print(f"fault at {time.time()}", flush=True)
        time.sleep(100_000)
    return [0.0] * len(responses)
"""


def test_a_reward_function_that_never_returns_is_shown_where_it_stands(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SLEEPS)
    options = "--zero_stage 2 --reward_fn reward.py --stall_timeout 10"
    ended = run("none", 0, "", 0, options, "reward function never returns on rank 0")
    assert "rank 0 made no progress" in ended.row("fault")
    assert "rank 0: phase scoring, step 1" in ended.row("where")
    assert "in reward_fn" in ended.report
    assert "time.sleep(100_000)" in ended.report


def test_a_failed_rank_does_not_wait_for_its_threads(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SLEEPS.replace('os.environ["RANK"] == "0"', "True"))
    ended = run("raise", 1, "experience", 1, "--zero_stage 2 --reward_fn reward.py")
    assert "rank 1 raised RuntimeError: planted" in ended.row("fault")


@pytest.mark.parametrize(("who", "seconds", "heartbeat"), [("ranks", 9, 6), ("torchrun", 13, 30)])
def test_processes_that_were_stopped_for_a_while_go_on(
    tiny: Path, tmp_path: Path, who: str, seconds: int, heartbeat: int
) -> None:
    """Of torchrun, as Ctrl-Z does, or of all its ranks."""

    def freeze(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            # Not what ranks start in between: a rank does not stop while it waits for a child that was stopped
            # between fork and exec.
            ranks = children()[process.pid]
            assert len(ranks) == 2
            for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0)):
                for pid in ranks if who == "ranks" else [process.pid]:
                    os.kill(pid, number)
                time.sleep(pause)

    options = [*small_ppo(tiny, tmp_path), "--reward_pretrain", tiny / "reward", "--heartbeat_timeout", heartbeat]
    place = ("none", 0, "", 0, "train_ppo", *options, "--stall_timeout", 8, "--num_episodes", 5)
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, on_line=freeze)
    assert ended.status == 0, ended.output
    assert "step 15/15" in ended.output


def test_the_end_of_the_launcher_ends_the_ranks(tiny: Path, tmp_path: Path) -> None:
    def kill_launcher(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.kill()

    place = ("sleep", 1, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path), "--reward_pretrain", tiny / "reward")
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, on_line=kill_launcher)
    assert "torchrun is gone" in ended.row("fault")
    ended.is_in_time("kill of torchrun in training")


@pytest.mark.parametrize("to", ["rank 0", "rank 1", "ranks", "torchrun", "all"])
def test_a_signal_to_any_process_is_known_on_all_ranks(tmp_path: Path, to: str) -> None:
    pids: dict[str, int] = {}

    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if found := re.match(r"(rank \d) (\d+) works", line):
            pids[found[1]] = int(found[2])
            if len(pids) == 2:
                time.sleep(1.5)
                chosen = {"ranks": list(pids.values()), "torchrun": [process.pid]}
                chosen["all"] = [*chosen["torchrun"], *chosen["ranks"]]  # as Slurm does; torchrun passes it on then
                for pid in chosen.get(to) or [pids[to]]:
                    os.kill(pid, signal.SIGTERM)

    ended = launch_and_watch("run_signals.py", 3, cwd=tmp_path, on_line=send)
    for rank in (0, 1):
        assert re.search(rf"^rank {rank} \d+ was asked by SIGTERM", ended.output, flags=re.MULTILINE)
        assert re.search(rf"^rank {rank} \d+ has left", ended.output, flags=re.MULTILINE)
    assert ended.output.count("SIGTERM: finishing the current micro-batch, then saving") == 1
    assert REPORT not in ended.output
    assert ended.status == (0 if "rank" in to else 1), "torchrun that got the signal itself ends with 1"


def test_a_second_signal_ends_all_ranks_at_once(tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if found := re.match(r"(rank \d) (\d+) works", line):
            pids[found[1]] = int(found[2])
        elif re.match(r"rank 1 \d+ was asked", line):
            time.sleep(3)
            os.kill(pids["rank 0"], signal.SIGTERM)
        if len(pids) == 2 and "works" in line:
            os.kill(pids["rank 0"], signal.SIGTERM)

    ended = launch_and_watch("run_signals.py", 100_000, cwd=tmp_path, on_line=send)
    assert ended.output.count("SIGTERM again: ended at once in phase training") == 1
    assert "has saved" not in ended.output
    assert REPORT not in ended.output
    assert "exitcode  : 143" in ended.output


def test_a_signal_while_loading_ends_the_run_with_one_line(tiny: Path, tmp_path: Path) -> None:
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.terminate()

    place = ("sleep", 1, "loading", 0, "train_ppo", *small_ppo(tiny, tmp_path), "--reward_pretrain", tiny / "reward")
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.output.count("SIGTERM: ended in phase loading") == 1
    assert REPORT not in ended.output


def same_weights(first: Path, second: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run in which nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*resumable(tiny, folder), "--actor_learning_rate", "1e-3"]
    assert launch_and_watch("run_faults.py", "none", 0, "", 0, "train_ppo", *arguments, cwd=folder).status == 0
    return folder / "model"


def resumable(tiny: Path, folder: Path) -> list[str]:
    options = f"--reward_pretrain {tiny}/reward --zero_stage 3 --save_steps 1 --load_checkpoint"
    return [*small_ppo(tiny, folder), *options.split()]


@pytest.mark.parametrize("phase", ["generation", "training", "saving"])
def test_torchrun_brings_a_killed_run_back_to_the_same_end(
    tiny: Path, undisturbed: Path, tmp_path: Path, phase: str
) -> None:
    place = ("kill", 1, phase, 2, "train_ppo", *resumable(tiny, tmp_path), "--actor_learning_rate", "1e-3")
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, launcher="--max_restarts 1")
    assert ended.status == 0, ended.output
    assert "rank 1 is gone" in ended.row("fault")
    assert "--load_checkpoint" in ended.row("resume")
    assert "torchrun starts all ranks again (restart 1 of 1)" in ended.row("resume")
    assert same_weights(tmp_path / "model", undisturbed)


def test_the_elastic_script_comes_back_from_its_last_checkpoint(tiny: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_rank_1(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 2/") and not killed:
            ranks = [pid for pid in descendants(process.pid) if b"\0LOCAL_RANK=1\0" in process_file(pid, "environ")]
            killed.append(ranks[0])
            os.kill(ranks[0], signal.SIGKILL)

    sizes = small_ppo(tiny, tmp_path)[4:-2]
    more = [*sizes, *"--no_apply_chat_template --num_episodes 3 --actor_learning_rate 1e-3".split()]
    script = ["bash", str(REPO / "examples" / "scripts" / "elastic.sh"), *more]
    folders = {"MODEL": tiny / "actor", "REWARD_MODEL": tiny / "reward", "DATA": tiny / "prompts.jsonl"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "GPUS": 2, "RESTARTS": 1, "SAVE_STEPS": 1, **folders}
    ended = watch(script, tmp_path, kill_rank_1, SAVE_PATH="disturbed", **variables)
    assert ended.status == 0, ended.output
    assert "rank 1 is gone: its process has ended" in ended.row("fault")
    assert "torchrun starts all ranks again (restart 1 of 1)" in ended.row("resume")
    (step,) = re.findall(r"going on from \S+/step_(\d+)$", ended.output, flags=re.MULTILINE)
    assert int(step) >= 1, "it was saved before step 2 ended"
    assert watch(script, tmp_path, SAVE_PATH="undisturbed", **variables).status == 0
    assert same_weights(tmp_path / "disturbed", tmp_path / "undisturbed")


def test_a_signal_to_one_rank_saves_and_the_same_command_goes_on(tiny: Path, undisturbed: Path, tmp_path: Path) -> None:
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            ranks = [pid for pid in descendants(process.pid) if b"run_faults.py" in process_file(pid, "cmdline")]
            os.kill(max(ranks), signal.SIGTERM)

    # Rank 1 waits in step 2 until the signal has come.
    place = ("wait", 1, "training", 2, "train_ppo", *resumable(tiny, tmp_path), "--actor_learning_rate", "1e-3")
    ended = launch_and_watch("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.status == 0, ended.output
    assert ended.output.count("SIGTERM: finishing the current micro-batch, then saving") == 1
    assert not (tmp_path / "model" / "model.safetensors").exists()
    again = launch_and_watch("run_faults.py", "none", 0, "", 0, *place[4:], cwd=tmp_path)
    assert again.status == 0, again.output
    assert same_weights(tmp_path / "model", undisturbed)


def process_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
