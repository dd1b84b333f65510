"""Two hosts train what one host with as many ranks trains. A host is a torchrun and a folder of its own here."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.runs import logged, vector
from tests.fork_server import ENVIRONMENT, SECONDS_UNTIL_A_HANG_IS_CERTAIN

pytestmark = pytest.mark.slow
PPO = """--pretrain actor --reward_pretrain reward --prompt_data prompts.jsonl --rollout_batch_size 8
    --train_batch_size 8 --micro_train_batch_size 3 --micro_rollout_batch_size 3 --generate_max_len 8
    --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --save_value_network"""


@pytest.fixture
def folders(tiny: Path, tmp_path: Path) -> list[Path]:
    """A folder of each host with models and data of its own."""
    return [Path(shutil.copytree(tiny, tmp_path / name)) for name in ("alpha", "beta")]


def train(ranks: int, folders: Sequence[Path], flags: Sequence[str], status: int = 0) -> list[str]:
    """What each host prints of ``train_ppo`` with so many ranks on each, in its folder and with its flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for number, folder in enumerate(folders):
        torchrun = f"""-m torch.distributed.run --nnodes 2 --node_rank {number} --nproc_per_node {ranks}
            --master_addr 127.0.0.1 --master_port {port} -m openppo.cli.train_ppo {flags[number]}"""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = [sys.executable, *torchrun.split()]
        running.append(subprocess.Popen(words, cwd=folder, env=os.environ | ENVIRONMENT, **pipes))  # type: ignore
    try:
        outputs = [
            process.communicate(timeout=SECONDS_UNTIL_A_HANG_IS_CERTAIN)[0] for process in running
        ]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [status, status], "".join(outputs)
    return outputs


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_two_hosts_train_and_resume_like_one(folders, tmp_path, launch, ranks, stage):
    """Bit for bit, with a folder of checkpoints that they share; models and logs are on the first host."""
    flags = f"{PPO} --zero_stage {stage} --save_path model --ckpt_path {tmp_path}/checkpoints --save_steps 1"
    before = set(folders[1].rglob("*"))
    first, second = train(ranks, folders, [flags, flags])
    assert set(folders[1].rglob("*")) == before
    assert "step 3/3" in first
    assert "step " not in second and "[openppo]" not in second
    one = f"{PPO} --zero_stage {stage} --save_path {tmp_path}/one".split()
    launch(2 * ranks, "-m", "openppo.cli.train_ppo", *one, cwd=folders[0])

    def check() -> None:
        assert logged(folders[0] / "model") == logged(tmp_path / "one")
        for suffix in ("", "_critic"):
            assert vector(folders[0] / f"model{suffix}").equal(vector(tmp_path / f"one{suffix}"))

    check()
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000003")
    (folders[0] / "model" / "model.safetensors").unlink()
    first, _ = train(ranks, folders, [f"{flags} --load_checkpoint"] * 2)
    assert "step 3/3" in first and "step 2/3" not in first
    check()


HOST = r"on rank 1 \(\S+\)"


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        (None, "", f": {HOST}: --prompt_data prompts.jsonl: "),
        ("turned", "", f"--prompt_data holds something else {HOST} than on rank 0"),
        ("same", "--seed 7", rf": --seed is 42 on rank 0 and 7 {HOST}: start all ranks alike\."),
        ("same", "", f"{HOST}: --save_path "),  # where checkpoints are by default
    ],
    ids=["missing data", "other data", "other options", "no shared folder"],
)
def test_hosts_that_differ_end_with_the_reason(folders, prompts, more, message):
    file = folders[1] / "prompts.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    if prompts == "turned":
        file.write_text("".join([*others, first]))
    elif prompts is None:
        file.unlink()
    said = "".join(train(1, folders, [PPO, f"{PPO} {more}"], status=1))
    assert re.search(message, said), said
