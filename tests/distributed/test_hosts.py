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
NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PPO = """--rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 3 --micro_rollout_batch_size 3
    --generate_max_len 8 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --zero_stage 3 --save_value_network"""
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


def files_in(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*")}


def logged(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without times."""
    lines = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("time/", "speed/"))} for line in lines]


@pytest.mark.parametrize(("ranks", "shared"), [(1, True), (2, False)])
def test_two_hosts_train_what_one_host_trains(
    hosts: Hosts, folders: list[Path], tmp_path: Path, launch: Callable[..., str], ranks: int, shared: bool
) -> None:
    before = files_in(folders[1])
    saved = tmp_path / "shared" / "model" if shared else folders[0] / "model"
    flags = f"{FILES} {PPO} --save_path {saved if shared else 'model'}"
    first, second = hosts.train(ranks, folders, [flags, flags])
    assert (first.status, second.status) == (0, 0), first.output + second.output

    one = f"{FILES} {PPO} --save_path {tmp_path}/one/model"
    launch(2 * ranks, "-m", "openppo.cli.train_ppo", *one.split(), cwd=folders[0])
    assert logged(saved) == logged(tmp_path / "one" / "model")
    for role in ("model", "model_critic"):
        got = load_file(saved.with_name(role) / "model.safetensors")
        want = load_file(tmp_path / "one" / role / "model.safetensors")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    written = files_in(folders[1]) - before  # without a shared folder, what its ranks need to go on
    assert {name.split("/")[1] for name in written if "/" in name} == (set() if shared else {"checkpoints_ppo"})
    assert "step 3/3" in first.output
    assert "step " not in second.output and "[openppo]" not in second.output


@pytest.mark.parametrize("stage", [0, 3])
def test_two_hosts_without_a_shared_folder_go_on_from_the_newest_checkpoint_that_both_have(
    hosts: Hosts, folders: list[Path], stage: int
) -> None:
    """Bit for bit: what comes after it is thrown away, as after a kill while one host saved, and made again."""
    flags = f"{FILES} {PPO.replace('--zero_stage 3', f'--zero_stage {stage}')} --save_path model --save_steps 1"
    ended = hosts.train(1, folders, [flags, flags])
    assert [host.status for host in ended] == [0, 0], ended[0].output + ended[1].output
    first, second = (folder / "model" / "checkpoints_ppo" for folder in folders)
    whole, metrics = (folders[0] / "model" / "model.safetensors").read_bytes(), logged(folders[0] / "model")
    assert [[file.name for file in each.glob("latest/actor-*")] for each in (first, second)] == [
        ["actor-00000.safetensors"],
        ["actor-00001.safetensors"],
    ]
    shutil.rmtree(second / "step_00000003")
    (folders[0] / "model" / "model.safetensors").unlink()

    ended = hosts.train(1, folders, [f"{flags} --load_checkpoint"] * 2)
    assert [host.status for host in ended] == [0, 0], ended[0].output + ended[1].output
    assert f"going on from {first / 'step_00000002'}" in ended[0].output
    assert "step 3/3" in ended[0].output
    assert "step 2/3" not in ended[0].output
    assert (first / "step_00000003.damaged.1").is_dir()
    assert (folders[0] / "model" / "model.safetensors").read_bytes() == whole
    assert logged(folders[0] / "model") == metrics


def test_data_that_one_host_lacks_end_both_with_its_name(hosts: Hosts, folders: list[Path]) -> None:
    (folders[1] / "prompts.jsonl").unlink()
    ended = hosts.train(1, folders, [f"{FILES} {PPO}"] * 2)
    assert [host.status for host in ended] == [1, 1]
    assert ": on rank 1 (beta): --prompt_data prompts.jsonl: " in ended[0].output + ended[1].output


def test_data_that_differ_end_both_hosts(hosts: Hosts, folders: list[Path]) -> None:
    rows = (folders[1] / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "prompts.jsonl").write_text("".join([*rows[1:], rows[0]]))
    ended = hosts.train(1, folders, [f"{FILES} {PPO}"] * 2)
    assert [host.status for host in ended] == [1, 1]
    assert "--prompt_data holds something else on rank 1 (beta) than on rank 0" in ended[0].output + ended[1].output


def test_options_that_differ_end_both_hosts_but_other_places_are_fine(hosts: Hosts, folders: list[Path]) -> None:
    folders[1].joinpath("prompts.jsonl").rename(folders[1] / "questions.jsonl")
    moved = FILES.replace("prompts", "questions")
    ended = hosts.train(1, folders, [f"{FILES} {PPO}", f"{moved} {PPO} --seed 7 --save_path other"])
    assert [host.status for host in ended] == [1, 1]
    said = ended[0].output + ended[1].output
    assert ": --seed is 42 on rank 0 and 7 on rank 1 (beta): start all ranks alike." in said
