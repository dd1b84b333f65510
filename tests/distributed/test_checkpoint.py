"""Checkpoints of real runs: killed at any moment, on a full disk, for other ranks, with other options."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.distributed.runs import left_by, logged
from tests.distributed.watched import watch

Launch = Callable[..., str]
STOP_AT = 8
"""In the third step; each has three checks: at its start, after generation and after scores."""
COMMON = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --pretrain_data {tiny}/documents.jsonl
    --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2 --micro_rollout_batch_size 4
    --generate_max_len 6 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"""
PPO = f"{COMMON} --reward_pretrain {{tiny}}/reward"
OTHER = f"{PPO} --num_episodes 2 --ema_beta 0.992 --save_steps 2"
CASES = {"2 to 1": ((2, 0), (1, 1)), "2 to 4": ((2, 3), (4, 3)), "4 to 2": ((4, 2), (2, 3))}
"""Ranks and ZeRO stage before and after."""


def command(tiny: Path, flags: str, *more: object) -> list[str]:
    return [
        "-m",
        "openppo.cli.train_ppo",
        *flags.replace("{tiny}", str(tiny)).split(),
        *map(str, more),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_cases: Callable[..., str]) -> Path:
    """An undisturbed run in ``whole``, stopped and resumed ones by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_cases(1, folder, {"whole": f"{OTHER} --zero_stage 1"}, "whole")
    for place, mode in enumerate(("first", "rest")):
        for name, places in CASES.items():
            ranks, stage = places[place]
            case = {"arguments": f"{OTHER} --zero_stage {stage}", "stop_at": STOP_AT}
            run_cases(ranks, folder, {name: case}, mode)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_resumes_with_another_number_of_ranks_and_another_stage(folder, name):
    whole, resumed = (left_by(folder / kind / "model") for kind in ("whole", name))
    assert (
        [line["step"] for line in resumed.metrics]
        == [line["step"] for line in whole.metrics]
        == [1, 2, 3, 4, 5, 6]
    )
    for found, expected in zip(resumed.metrics, whole.metrics, strict=True):
        assert found == {
            key: pytest.approx(value, rel=1e-3, abs=1e-5) for key, value in expected.items()
        }
    if name == "2 to 1":  # rank 0 has all samples to choose from
        responses = [
            [s["response"] for s in run.samples if s["step"] > 2] for run in (resumed, whole)
        ]
        assert responses[0] == responses[1]
    got, want = (load(files["model/model.safetensors"]) for files in (resumed.files, whole.files))
    vectors = [
        torch.cat([weights[key].flatten() for key in sorted(weights)]) for weights in (got, want)
    ]
    assert (vectors[0] - vectors[1]).norm() <= 1e-5 * vectors[1].norm()


@pytest.mark.parametrize(
    ("numbers", "episodes"), [((3, 2), 6), pytest.param((12, 8), 12, marks=pytest.mark.slow)]
)
def test_kills_at_random_moments_change_nothing(
    numbers, episodes, tiny, tmp_path, run_cases, launch
):
    flags = f"""{PPO} --num_episodes {episodes} --rollout_batch_size 4 --generate_max_len 4 --zero_stage 2
        --save_steps 1 --max_ckpt_num 2"""
    save_path = tmp_path / "killed" / "model"
    save_path.parent.mkdir()
    words = command(tiny, flags, "--load_checkpoint", "--save_path", save_path)[2:]
    (tmp_path / "arguments.json").write_text(json.dumps(words))
    script = Path(__file__).with_name("run_kills.py")
    print(launch(0, script, tmp_path / "arguments.json", save_path.parent, *numbers))
    killed = json.loads((save_path.parent / "kills.json").read_text())
    assert killed["last"] == [0, 0]
    hits = [kill for kill in killed["kills"] if -9 in kill["statuses"]]
    assert len(hits) == sum(numbers), "the run ended before all kills were made"
    assert sum(bool(kill["half"]) for kill in hits) >= numbers[1] - 2, "too few hit a save"
    places = {kill["found"][-1] for kill in hits if kill["found"]}
    assert len(places) >= len(hits) // 4, "they were not spread over the run"
    run_cases(2, tmp_path, {"whole": flags}, "whole")
    assert left_by(save_path) == left_by(tmp_path / "whole" / "model")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB, of which 16 MB must be free at the start."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    (tmp_path / "fills.py").write_text(FILLS.replace("{disk}", str(disk)))
    yield disk
    subprocess.run(["umount", disk], check=True)


FILLS = """import pathlib
def reward_fn(prompts, responses):
    disk = pathlib.Path(r"{disk}")
    try:
        first = (disk / "c").exists() and not (disk / "c/latest").exists()
        if not first and not disk.with_name("was full").exists():
            (disk / "ballast").write_bytes(bytes(2**25))
    except OSError:
        pass
    return [float(len(response)) for response in responses]
"""


def test_a_full_disk_stops_the_run_with_a_message_and_keeps_what_was_saved(
    tiny, tmp_path, small_disk, launch
):
    checkpoints, model = small_disk / "c", tmp_path / "model"
    more = f"--reward_fn {tmp_path}/fills.py --num_episodes 9 --save_steps 1"
    words = command(tiny, f"{COMMON} {more}", "--save_path", model, "--ckpt_path", checkpoints)
    output = launch(2, *words, status=1)
    assert "No space left on device" in output
    assert "Checkpoints that were there before are untouched" in output
    assert sorted(path.name for path in checkpoints.glob("[!.]*")) == ["latest", "step_00000001"]
    output = launch(2, *words, status=1)
    assert (
        f"--ckpt_path {checkpoints}: a checkpoint takes 0.00 GiB and 0.00 GiB are free there: make room"
        in output
    )


def test_a_disk_that_is_full_at_the_end_loses_nothing_that_was_trained(
    tiny, tmp_path, small_disk, launch
):
    words = command(
        tiny, f"{COMMON} --save_steps 0 --reward_fn {tmp_path}/fills.py --ckpt_path {tmp_path}/c"
    )
    output = launch(2, *words, "--save_path", small_disk / "model", status=1)
    kept = tmp_path / "c" / "step_00000003"
    assert f"the model cannot be written to {small_disk}/model" in output
    assert f"All that was trained is in {kept}: make room, or choose another --save_path" in output
    (small_disk / "ballast").unlink()
    (tmp_path / "was full").touch()
    output = launch(2, *words, "--save_path", small_disk / "model", "--load_checkpoint")
    assert f"resuming from {kept}" in output
    assert "step 3/3" not in output
    shutil.rmtree(tmp_path / "c")
    launch(2, *words, "--save_path", tmp_path / "whole")
    trained, whole = (
        place / "model.safetensors" for place in (small_disk / "model", tmp_path / "whole")
    )
    assert trained.read_bytes() == whole.read_bytes()


HANGS = """import pathlib, sys, time
calls = pathlib.Path(__file__).with_name("calls")
def reward_fn(prompts, responses):
    with calls.open("a") as file:
        file.write(".")
    print("scoring")  # into a buffer, as stdout is no terminal
    if calls.read_text() == "..":
        print("hangs", file=sys.stderr)
        time.sleep(1000)
    return [float(len(response)) for response in responses]
"""


def test_one_rank_whose_reward_function_hangs_saves_upon_a_signal_and_ends(tiny, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    words = [sys.executable, *command(tiny, f"{COMMON} --reward_fn hangs.py --save_path model")]
    ended = watch(
        words, tmp_path, lambda line, process: process.terminate() if line == "hangs\n" else None
    )
    assert ended.status == 0
    assert (
        "stopped by SIGTERM after 1 of 3 steps. The same command with --load_checkpoint continues"
        in ended.output
    )
    assert ended.output.count("scoring\n") == 2, "what was printed last got lost"
    assert (tmp_path / "model" / "checkpoints_ppo" / "latest" / "manifest.json").is_file()
    assert [line["step"] for line in logged(tmp_path / "model")] == [1]


REMOVES = """
import os
import shutil
from pathlib import Path

def reward_fn(responses):
    logs = Path("model/logs/metrics.jsonl")
    if os.environ["RANK"] == "0" and logs.is_file() and len(logs.read_text().splitlines()) == 2:
        shutil.rmtree("model")
    return [1.0 * len(response) for response in responses]
"""


def test_a_save_path_that_is_removed_is_made_again(tiny, tmp_path, launcher):
    (tmp_path / "reward.py").write_text(REMOVES)
    words = command(
        tiny, f"{COMMON} --reward_fn reward.py --save_path model --save_steps 1 --max_steps 3"
    )
    done = launcher.run([*words, "--advantage_estimator", "reinforce"], 2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (
        f"--save_path {tmp_path}/model/checkpoints_ppo was removed during the run: it is made again"
        in done.stdout
    )
    assert (
        "model/logs was removed during the run: it is made again, without what was logged before"
        in done.stdout
    )
    assert [row["step"] for row in logged(tmp_path / "model")] == [3]
    assert (tmp_path / "model/model.safetensors").is_file()
    assert (tmp_path / "model/logs/report.html").is_file()
    resumed = launcher.run(
        [*words, "--advantage_estimator", "reinforce", "--load_checkpoint"], 2, cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stdout
    assert "step_00000003" in resumed.stdout
