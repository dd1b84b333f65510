"""Each kind of fault ends all ranks in time, with one report that names rank, phase and step."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.watched import HERE, REPORT, Ended, small_ppo, torchrun
from tests.fork_server import Launcher

Fail = Callable[..., Ended]
SILENT, STALLS = "--heartbeat_timeout 12", "--stall_timeout 10"
RAISES = """
import os, time

def fail(score):
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
        print(f"fault at {time.time()}", flush=True)
        raise LookupError("no such answer")
    return score

"""
RAISES_ALONE = f"{RAISES}async def reward_fn(response):\n    return fail(0.0)\n"
RAISES_IN_BATCH = f"{RAISES}def reward_fn(responses):\n    return fail([0.0] * len(responses))\n"
SLEEPS = """
import os, time

def reward_fn(responses):
    if os.environ["RANK"] in "RANKS":
        print(f"fault at {time.time()}", flush=True)
        time.sleep(100_000)
    return [0.0] * len(responses)
"""


class Case(NamedTuple):
    """A fault of run_faults.py, or "none" where the function ``reward`` is the fault; what is reported of it."""

    fault: str
    rank: int
    phase: str
    step: int
    what: str
    options: str = ""
    says: tuple[str, ...] = ()
    reward: str = ""
    command: str = "train_ppo"


GONE, RAISED, STALLED = "is gone: its process has ended", "raised", "made no progress"
SILENCE = "is gone: no heartbeat for"
REWARD_RAISED = "raised RuntimeError: --reward_fn reward.py raised LookupError"
IN_EVALUATION = (
    "--zero_stage 3 --ema_beta 0.992 --eval_before_training --eval_data {tiny}/prompts.jsonl"
)
KILLED, IN_FAIL = ("-9: killed",), ("in fail",)
MEMORY = ("can't allocate memory", "--micro_train_batch_size 2")
MEMORY += ("reduce memory in training with --micro_train_batch_size, --gradient_checkpointing",)
RM = """--pretrain {tiny}/reward --dataset {tiny}/preference.jsonl --prompt_key prompt --train_batch_size 4
    --micro_train_batch_size 1 --zero_stage 3 --save_path model"""
CASES = {
    "kill while loading": Case("kill", 1, "loading", 0, GONE, "--zero_stage 3", KILLED),
    "kill in generation": Case(
        "kill", 0, "generation", 2, GONE, "--zero_stage 2 --save_steps 1", KILLED
    ),
    "kill in training": Case("kill", 1, "training", 2, GONE, "--zero_stage 3", KILLED),
    "kill of train_rm": Case("kill", 1, "step", 2, GONE, RM, KILLED, command="train_rm"),
    "crash in C": Case("segfault", 1, "training", 1, GONE, says=("in string_at",)),
    "raise": Case(
        "raise",
        0,
        "scoring",
        2,
        RAISED,
        says=("RuntimeError: planted", 'fail(RuntimeError("planted"))'),
    ),
    "raise while a thread sleeps": Case(
        "raise",
        1,
        "experience",
        1,
        RAISED,
        "--zero_stage 2",
        ("planted",),
        SLEEPS.replace("RANKS", "01"),
    ),
    "async reward raises": Case(
        "none", 1, "scoring", 1, REWARD_RAISED, "--zero_stage 3", IN_FAIL, RAISES_ALONE
    ),
    # All ranks swap averaged weights back before one of them can fail.
    "reward raises in evaluation": Case(
        "none", 1, "evaluation", 0, REWARD_RAISED, IN_EVALUATION, IN_FAIL, RAISES_IN_BATCH
    ),
    "reward never returns": Case(
        "none",
        0,
        "scoring",
        1,
        STALLED,
        STALLS,
        ('reward.py", line 7 in reward_fn',),
        SLEEPS.replace("RANKS", "0"),
    ),
    "stall": Case("sleep", 1, "experience", 1, STALLED, f"--zero_stage 3 {STALLS}", ("in sleep",)),
    "stall before a collective": Case("lag", 1, "experience", 1, STALLED, STALLS, ("in lag",)),
    "blocked store client": Case(
        "wait_in_store", 0, "training", 1, STALLED, STALLS, ("in wait_in_store",)
    ),
    "stopped": Case("stop", 0, "experience", 1, SILENCE, SILENT, ("--heartbeat_timeout",)),
    "GIL held": Case("hold", 1, "generation", 1, SILENCE, SILENT, ("in hold",)),
    "out of memory": Case("exhaust", 1, "training", 1, RAISED, "--zero_stage 3", MEMORY),
}


@pytest.fixture
def fail(tiny: Path, tmp_path: Path, launcher: Launcher) -> Fail:
    """``fail(case)`` runs a command with that fault, to its end in time."""

    def run(case: Case, ranks: int = 2) -> Ended:
        options = case.options.replace("{tiny}", str(tiny))
        if case.reward:
            (tmp_path / "reward.py").write_text(case.reward)
            options += " --reward_fn reward.py"
        flags = (
            small_ppo(tiny, tmp_path, options) if case.command == "train_ppo" else options.split()
        )
        place = (case.rank, case.phase, case.step) if case.fault != "none" else (0, "", 0)
        words = [
            str(word) for word in (HERE / "run_faults.py", case.fault, *place, case.command, *flags)
        ]
        done = launcher.run(words, ranks, cwd=tmp_path)
        ended = Ended(words, done.stdout, done.returncode, time.time())
        assert ended.status != 0
        ended.is_in_time()
        return ended

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_reported_with_rank_phase_and_step(fail, name):
    case = CASES[name]
    ended = fail(case)
    assert f"rank {case.rank} {case.what}" in ended.row("fault")
    where = f"step {case.step}" if case.step else "before the first step"
    assert f"rank {case.rank}: phase {case.phase}, {where}" in ended.row("where")
    assert f"rank {1 - case.rank}: phase" in ended.row("others")
    has_checkpoint = "--save_steps 1" in case.options and case.step > 1
    assert ("--load_checkpoint" in ended.row("resume")) == has_checkpoint
    assert [text for text in case.says if text not in ended.output] == []
    assert "gloo" not in ended.report, "the cause, not its consequences"
    assert "SIGTERM:" not in ended.output, (
        "the launcher's signal to the other rank is not an operator's"
    )
    if name == "out of memory":
        sizes = r"process \d+\.\d+ GiB, machine \d+\.\d+ GiB available of \d+\.\d+ GiB"
        assert re.search(sizes, ended.row("memory"))
        assert "--zero_stage 3" not in ended.row("try"), "the run has it already"


def test_a_lone_rank_that_holds_the_gil_ends_with_its_position(fail):
    ended = fail(Case("hold", 0, "experience", 1, "", "--heartbeat_timeout 20"), ranks=0)
    assert ended.output.count("Timeout (0:00:18") == 1
    assert "OpenPPO rank 0: phase experience, step 1" in ended.output
    assert "in hold" in ended.output


@pytest.fixture
def deepspeed() -> str:
    """DeepSpeed's launcher, which hosts no store: rank 0 does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"deepspeed.launcher.runner --num_gpus 2 --master_port {probe.getsockname()[1]}"


@pytest.mark.slow
def test_the_store_may_end_with_rank_0(tiny, tmp_path, deepspeed):
    place = ("kill", 0, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, launcher=deepspeed)
    assert ended.status != 0
    ended.is_in_time()
    assert f"rank 0 {GONE}" in ended.row("fault")
    assert "rank 0: phase training, step 1" in ended.row("where")


def test_a_rank_may_end_after_rank_0_and_its_store(tmp_path, deepspeed):
    ended = torchrun("run_late.py", cwd=tmp_path, launcher=deepspeed)
    assert ended.status == 0, ended.output
    assert REPORT not in ended.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_or_silence_of_the_launcher_ends_the_ranks(tiny, tmp_path, number):
    def disturb(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.send_signal(number)
        elif line.startswith("Timeout"):
            process.kill()

    place = ("sleep", 1, "training", 1, "train_ppo", *small_ppo(tiny, tmp_path, SILENT))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=disturb)
    if number == signal.SIGKILL:
        assert "torchrun" in ended.row("fault")
        assert "phase training, step 1" in ended.row("where")
    else:
        assert re.search(r"OpenPPO rank \d: phase training, step 1", ended.output)
    ended.is_in_time()
