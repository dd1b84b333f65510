"""A run that was killed or asked to exit resumes to the weights of an undisturbed one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.distributed.runs import vector
from tests.distributed.watched import rank_process, small_ppo, torchrun, watch
from tests.fork_server import REPO


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


def test_a_signal_saves_and_the_same_command_resumes(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> None:
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            os.kill(rank_process(process.pid, 1), signal.SIGTERM)

    # Rank 1 waits in step 2 until the signal has come.
    options = "--zero_stage 3 --save_steps 1 --load_checkpoint --actor_learning_rate 1e-3"
    command = small_ppo(tiny, tmp_path, options)
    place = ("wait_for_signal", 1, "training", 2, "train_ppo", *command)
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.status == 0, ended.output
    assert ended.output.count("SIGTERM: saving a checkpoint, then exiting") == 1
    assert not (tmp_path / "model" / "model.safetensors").exists()
    for words in (command, small_ppo(tiny, tmp_path / "undisturbed", options)):
        launch(2, "-m", "openppo.cli.train_ppo", *words, cwd=tmp_path)
    assert vector(tmp_path / "model").equal(vector(tmp_path / "undisturbed/model"))
