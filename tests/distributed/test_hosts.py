"""Two hosts train what one host with as many ranks trains. A host is a network namespace with a name of its own."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PPO = """--rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 3 --micro_rollout_batch_size 3
    --generate_max_len 8 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --save_value_network"""
FILES = "--pretrain actor --reward_pretrain reward --prompt_data prompts.jsonl"
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 900  # other tests run beside it


@dataclass(frozen=True)
class Ended:
    """What a host printed, and the exit status of its torchrun."""

    status: int
    output: str


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.spaces = [f"openppo{os.getpid()}{name}" for name in NAMES]

    def __enter__(self) -> "Hosts":
        try:
            for space in self.spaces:
                ip(f"netns add {space}")
            first, second = self.spaces
            ip(f"link add eth0 netns {first} type veth peer name eth0 netns {second}")
            for space, address in zip(self.spaces, ADDRESSES, strict=True):
                ip(f"-n {space} address add {address}/24 dev eth0")
                ip(f"-n {space} link set eth0 up")
                ip(f"-n {space} link set lo up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"{shlex.join(error.cmd)}: {error.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)

    def train(self, ranks: int, folders: Sequence[Path], flags: Sequence[str]) -> list[Ended]:
        """``train_ppo`` with so many ranks on each host, each in its folder and with its flags, until both end."""
        running = []
        for number, (name, space, folder) in enumerate(zip(NAMES, self.spaces, folders, strict=True)):
            torchrun = f"""{shlex.quote(sys.executable)} -m torch.distributed.run --nnodes 2 --node_rank {number}
                --nproc_per_node {ranks} --master_addr {ADDRESSES[0]} --master_port 29500"""
            command = f"hostname {name} && exec {torchrun} -m openppo.cli.train_ppo {flags[number]}"
            running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", " ".join(command.split())],
                    cwd=folder,
                    env=os.environ
                    | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
                    | {"GLOO_SOCKET_IFNAME": "eth0"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=SECONDS_UNTIL_A_HANG_IS_CERTAIN)[0] for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return [Ended(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def ip(arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Gone again at the end, whatever happens."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with Hosts() as pair:
        yield pair


@pytest.fixture
def folders(tiny: Path, tmp_path: Path) -> list[Path]:
    """A folder of each host with models and data of its own."""
    return [Path(shutil.copytree(tiny, tmp_path / name)) for name in NAMES]


def logged(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without times."""
    lines = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("time/", "speed/"))} for line in lines]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_two_hosts_train_and_resume_like_one(
    hosts: Hosts, folders: list[Path], tmp_path: Path, launch: Callable[..., str], ranks: int, stage: int
) -> None:
    """Bit for bit, with a folder of checkpoints that they share; models and logs are on the first host."""
    ppo = f"{FILES} {PPO} --zero_stage {stage}"
    flags = f"{ppo} --save_path model --ckpt_path {tmp_path}/checkpoints --save_steps 1"
    before = set(folders[1].rglob("*"))
    first, second = hosts.train(ranks, folders, [flags, flags])
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert set(folders[1].rglob("*")) == before
    assert "step 3/3" in first.output
    assert "step " not in second.output and "[openppo]" not in second.output

    launch(2 * ranks, "-m", "openppo.cli.train_ppo", *f"{ppo} --save_path {tmp_path}/one".split(), cwd=folders[0])

    def check() -> None:
        assert logged(folders[0] / "model") == logged(tmp_path / "one")
        for suffix in ("", "_critic"):
            got, want = (load_file(f"{folder}{suffix}/model.safetensors") for folder in (saved, tmp_path / "one"))
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)

    saved = folders[0] / "model"
    check()
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000003")
    (saved / "model.safetensors").unlink()
    ended = hosts.train(ranks, folders, [f"{flags} --load_checkpoint"] * 2)
    assert [host.status for host in ended] == [0, 0], ended[0].output + ended[1].output
    assert "step 3/3" in ended[0].output
    assert "step 2/3" not in ended[0].output
    check()


def lose_prompts(folder: Path) -> str:
    (folder / "prompts.jsonl").unlink()
    return ""


def turn_prompts(folder: Path) -> str:
    rows = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join([*rows[1:], rows[0]]))
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_prompts, ": on rank 1 (beta): --prompt_data prompts.jsonl: "),
        (turn_prompts, "--prompt_data holds something else on rank 1 (beta) than on rank 0"),
        (lambda _: "--seed 7", ": --seed is 42 on rank 0 and 7 on rank 1 (beta): start all ranks alike."),
        (lambda _: "", "on rank 1 (beta): --save_path "),  # where checkpoints are by default
    ],
    ids=["missing data", "other data", "other options", "no shared folder"],
)
def test_hosts_that_differ_end_with_the_reason(
    hosts: Hosts, folders: list[Path], change: Callable[[Path], str], message: str
) -> None:
    ended = hosts.train(1, folders, [f"{FILES} {PPO}", f"{FILES} {PPO} {change(folders[1])}"])
    assert [host.status for host in ended] == [1, 1]
    said = ended[0].output + ended[1].output
    assert message in said, said
