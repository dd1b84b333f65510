"""A run that was killed or asked to exit resumes to the weights of an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.runs import vector
from tests.distributed.watched import TORCHRUN, rank_process, small_ppo, torchrun, watch
from tests.fork_server import REPO, Launcher


def resumable(tiny: Path, folder: Path) -> list[str]:
    return small_ppo(tiny, folder, "--zero_stage 3 --save_steps 1 --load_checkpoint --actor_learning_rate 1e-3")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Path:
    """The model of a run in which nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launcher.run(["-m", "openppo.cli.train_ppo", *resumable(tiny, folder)], 2, cwd=folder)
    assert done.returncode == 0, done.stdout
    return folder / "model"


@pytest.mark.parametrize(("rank", "phase"), [(1, "training"), pytest.param(0, "saving", marks=pytest.mark.slow)])
def test_torchrun_restarts_a_killed_run(tiny: Path, undisturbed: Path, tmp_path: Path, rank: int, phase: str) -> None:
    place = ("kill", rank, phase, 2, "train_ppo", *resumable(tiny, tmp_path))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, launcher=f"{TORCHRUN} --max_restarts 1")
    assert ended.status == 0, ended.output
    assert f"rank {rank} is gone" in ended.row("fault")
    assert "--load_checkpoint" in ended.row("resume")
    assert "torchrun starts all ranks again (restart 1 of 1)" in ended.row("resume")
    assert vector(tmp_path / "model").equal(vector(undisturbed))


def test_the_elastic_script_resumes_from_its_newest_checkpoint(tiny: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_rank_1(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 2/") and not killed:
            killed.append(rank_process(process.pid, 1))
            os.kill(killed[0], signal.SIGKILL)

    sizes = small_ppo(tiny, tmp_path)[4:-4]
    more = [*sizes, *"--no_apply_chat_template --num_episodes 3 --actor_learning_rate 1e-3".split()]
    script = ["bash", str(REPO / "examples" / "scripts" / "elastic.sh"), *more]
    folders = {"MODEL": tiny / "actor", "REWARD_MODEL": tiny / "reward", "DATA": tiny / "prompts.jsonl"}
    variables = {"GPUS": 2, "RESTARTS": 1, "SAVE_STEPS": 1, **folders}
    real = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = watch(script, tmp_path, kill_rank_1, SAVE_PATH="disturbed", PATH=real, **variables)
    assert ended.status == 0, ended.output
    assert "rank 1 is gone: its process has ended" in ended.row("fault")
    assert "torchrun starts all ranks again (restart 1 of 1)" in ended.row("resume")
    (step,) = re.findall(r"from \S+/step_(\d+)$", ended.output, flags=re.MULTILINE)
    assert int(step) >= 1, "it was saved before step 2 ended"
    assert watch(script, tmp_path, SAVE_PATH="undisturbed", PATH=real, **variables).status == 0
    assert vector(tmp_path / "disturbed").equal(vector(tmp_path / "undisturbed"))


def test_a_signal_saves_and_the_same_command_resumes(
    tiny: Path, undisturbed: Path, tmp_path: Path, launcher: Launcher
) -> None:
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            os.kill(rank_process(process.pid, 1), signal.SIGTERM)

    # Rank 1 waits in step 2 until the signal has come.
    command = resumable(tiny, tmp_path)
    place = ("wait_for_signal", 1, "training", 2, "train_ppo", *command)
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.status == 0, ended.output
    assert ended.output.count("SIGTERM: saving a checkpoint, then exiting") == 1
    assert not (tmp_path / "model" / "model.safetensors").exists()
    again = launcher.run(["-m", "openppo.cli.train_ppo", *command], 2, cwd=tmp_path)
    assert again.returncode == 0, again.stdout
    assert vector(tmp_path / "model").equal(vector(undisturbed))
