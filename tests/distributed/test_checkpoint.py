"""Checkpoints of real runs: killed at any moment, damaged, on a full disk, for other ranks, with other options."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

RESUME = Path(__file__).with_name("run_resume.py")
STEP = 3
"""Checks of a step: at its start, after generation and after scores; an evaluation has the last two."""
KILLS = Path(__file__).with_name("run_kills.py")
REPO = Path(__file__).resolve().parents[2]

PPO = """--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2
    --micro_rollout_batch_size 4 --generate_max_len 6 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"""


def arguments(tiny: Path, more: str) -> list[str]:
    return f"{PPO} {more}".replace("{tiny}", str(tiny)).split()


@pytest.fixture(scope="module")
def run_case(tiny: Path, launch: Callable[..., str]) -> Callable[..., Path]:
    """``run_case(ranks, mode, more, folder, stop_at)``: a case of run_resume.py; returns its ``save_path``."""

    def run(ranks: int, mode: str, more: str, folder: Path, stop_at: int = 0) -> Path:
        folder.mkdir(exist_ok=True)
        case = {
            "name": folder.name,
            "command": "train_ppo",
            "arguments": arguments(tiny, more),
            "stop_at": stop_at,
        }
        (folder / "cases.json").write_text(json.dumps([case]))
        launch(ranks, RESUME, folder / "cases.json", folder.parent, mode)
        return folder / "model"

    return run


TWO_EPISODES = "--num_episodes 2 --enable_ema --save_steps 2 --zero_stage {}"


@pytest.fixture(scope="module")
def on_one_rank(
    run_case: Callable[..., Path], left_by: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The undisturbed run that others are compared with."""
    folder = tmp_path_factory.mktemp("one_rank")
    return left_by(run_case(1, "whole", TWO_EPISODES.format(0), folder / "whole"))


@pytest.mark.parametrize(
    ("n_random", "n_saving", "n_starting", "episodes"),
    [(2, 2, 1, 6), pytest.param(9, 7, 4, 12, marks=pytest.mark.slow)],
)
def test_kills_at_random_moments_change_nothing(
    n_random: int,
    n_saving: int,
    n_starting: int,
    episodes: int,
    tiny: Path,
    tmp_path: Path,
    run_case: Callable[..., Path],
    left_by: Callable[[Path], Any],
    launch: Callable[..., str],
) -> None:
    more = f"""--num_episodes {episodes} --rollout_batch_size 4 --generate_max_len 4 --zero_stage 2 --save_steps 1
        --max_ckpt_num 2"""
    save_path = tmp_path / "killed" / "model"
    save_path.parent.mkdir()
    (tmp_path / "arguments.json").write_text(
        json.dumps([*arguments(tiny, more), "--load_checkpoint", "--save_path", str(save_path)])
    )
    print(launch(0, KILLS, tmp_path / "arguments.json", save_path.parent, n_random, n_saving, n_starting))
    killed = json.loads((save_path.parent / "kills.json").read_text())
    assert killed["last"] == [0, 0]
    hits = [kill for kill in killed["kills"] if -9 in kill["statuses"]]
    assert len(hits) == n_random + n_saving + n_starting, "the run ended before all kills were made"
    half = sum(bool(kill["half"]) and kill["kind"] != "while starting" for kill in hits)
    assert half >= n_saving - 2, "too few hit a save"
    assert sum(kill["kind"] == "while starting" for kill in hits) == n_starting
    places = {kill["found"][-1] for kill in hits if kill["found"]}
    assert len(places) >= len(hits) // 4, "they were not spread over the run"

    assert left_by(save_path) == left_by(run_case(2, "whole", more, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("before", "after", "stages"), [(2, 1, (2, 2)), (2, 4, (3, 3)), (4, 2, (2, 3)), (1, 2, (0, 1))]
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks_and_another_stage(
    tmp_path: Path,
    run_case: Callable[..., Path],
    left_by: Callable[[Path], Any],
    before: int,
    after: int,
    stages: tuple,
) -> None:
    more = "--num_episodes 2 --enable_ema --save_steps 2 --zero_stage {}"
    whole = left_by(run_case(1, "whole", more.format(0), tmp_path / "whole"))
    parts = tmp_path / "parts"
    run_case(before, "first", more.format(stages[0]), parts, stop_at=2 * STEP + 2)
    resumed = left_by(run_case(after, "rest", more.format(stages[1]), parts))

    assert [line["step"] for line in resumed.metrics] == [line["step"] for line in whole.metrics] == [1, 2, 3, 4, 5, 6]
    for got, want in zip(resumed.metrics, whole.metrics, strict=True):
        assert got == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in want.items()}
    if after == 1:  # rank 0 has all samples to choose from
        responses = [[s["response"] for s in run.samples if s["step"] > 2] for run in (resumed, whole)]
        assert responses[0] == responses[1]
    got, want = (load(files["model/model.safetensors"]) for files in (resumed.files, whole.files))
    vectors = [torch.cat([weights[name].flatten() for name in sorted(weights)]) for weights in (got, want)]
    assert (vectors[0] - vectors[1]).norm() <= 1e-5 * vectors[1].norm()


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path: Path, run_case: Callable[..., Path], left_by: Callable[[Path], Any]
) -> None:
    more = "--num_episodes 2 --save_steps 2"
    whole = left_by(run_case(2, "whole", more, tmp_path / "whole"))
    parts = run_case(2, "first", more, tmp_path / "parts", stop_at=5 * STEP + 2)
    newest = (parts / "checkpoints_ppo" / "latest").resolve()
    file = newest / "critic-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    run_case(2, "rest", more, tmp_path / "parts")
    assert newest.with_name(newest.name + ".damaged.1").exists()
    assert left_by(parts) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB: room for few checkpoints of the tiny models, since 16 MB must stay free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_stops_the_run_with_a_message_and_keeps_what_was_saved(
    tiny: Path, tmp_path: Path, small_disk: Path, launch: Callable[..., str]
) -> None:
    more = arguments(tiny, "--num_episodes 9 --save_steps 1 --max_ckpt_num 20")
    command = ["-m", "openppo.cli.train_ppo", *more, "--save_path", tmp_path / "model", "--ckpt_path", small_disk / "c"]
    output = launch(2, *command, status=1)
    assert "a checkpoint takes 0.02 GiB and" in output
    assert "make room, or give another --ckpt_path" in output
    assert "Checkpoints that were there before are untouched" in output
    kept = sorted(path.name for path in (small_disk / "c").glob("[!.]*"))
    assert kept[0] == "latest"
    assert len(kept) > 2
    (small_disk / "ballast").write_bytes(bytes(2**20))
    output = launch(0, *command, "--load_checkpoint", status=2)
    assert output.rstrip().splitlines()[-1].startswith("error: --ckpt_path")
    (small_disk / "ballast").unlink()
    shutil.rmtree(small_disk / "c" / kept[1])
    assert f"resuming from {small_disk / 'c' / kept[-1]}" in launch(0, *command, "--load_checkpoint", status=1)


FILLS = """import pathlib
def reward_fn(prompts, responses):
    disk = pathlib.Path(r"{disk}")
    try:
        if not disk.with_name("was full").exists():
            (disk / "ballast").write_bytes(bytes(2**25))
    except OSError:
        pass
    return [float(len(response)) for response in responses]
"""


def test_a_disk_that_is_full_at_the_end_loses_nothing_that_was_trained(
    tiny: Path, tmp_path: Path, small_disk: Path, launch: Callable[..., str], left_by: Callable[[Path], Any]
) -> None:
    (tmp_path / "fills.py").write_text(FILLS.replace("{disk}", str(small_disk)))
    more = PPO.replace("--reward_pretrain {tiny}/reward", f"--reward_fn {tmp_path}/fills.py").replace(
        "{tiny}", str(tiny)
    )
    command = ["-m", "openppo.cli.train_ppo", *more.split(), "--save_steps", "0", "--ckpt_path", tmp_path / "c"]
    output = launch(2, *command, "--save_path", small_disk / "model", status=1)
    kept = tmp_path / "c" / "step_00000003"
    assert f"the model cannot be written to {small_disk}/model" in output
    assert f"All that was trained is in {kept}: make room, or choose another --save_path" in output
    (small_disk / "ballast").unlink()
    (tmp_path / "was full").touch()
    output = launch(2, *command, "--save_path", small_disk / "model", "--load_checkpoint")
    assert f"resuming from {kept}" in output
    assert "step 3/3" not in output
    launch(2, *command[:-1], tmp_path / "undisturbed", "--save_path", tmp_path / "whole")
    trained, whole = (folder / "model.safetensors" for folder in (small_disk / "model", tmp_path / "whole"))
    assert trained.read_bytes() == whole.read_bytes()


def test_too_little_room_for_the_trained_model_is_an_error_before_training(
    tiny: Path, tmp_path: Path, small_disk: Path, launch: Callable[..., str]
) -> None:
    (small_disk / "ballast").write_bytes(bytes(2**23))
    command = ["-m", "openppo.cli.train_ppo", *arguments(tiny, "--save_steps 0"), "--ckpt_path", tmp_path / "c"]
    output = launch(0, *command, "--save_path", small_disk / "model", status=2)
    assert f"error: --save_path {small_disk}: the trained model takes 0.02 GiB and" in output


DRAWS = """import pathlib, random
def reward_fn(prompts, responses):
    with pathlib.Path(__file__).with_name("drawn").open("a") as drawn:
        drawn.write(f"{len(prompts)}\\n")
    return [random.random() for response in responses]
"""


def test_random_rewards_are_the_same_after_a_stop_in_an_evaluation(
    tiny: Path, tmp_path: Path, run_case: Callable[..., Path], left_by: Callable[[Path], Any]
) -> None:
    """Also where it was stopped after the reward function had drawn its numbers."""
    (tmp_path / "draws.py").write_text(DRAWS)
    more = f"--reward_fn {tmp_path}/draws.py --eval_data {tiny}/sft.jsonl --eval_steps 1 --save_steps 1"
    whole = run_case(1, "whole", more, tmp_path / "whole")
    (tmp_path / "drawn").unlink()
    parts = run_case(1, "first", more, tmp_path / "parts", stop_at=2 * STEP + 4)
    assert not (parts / "config.json").exists(), "the run was not stopped"
    assert (tmp_path / "drawn").read_text().split() == ["8", "26"] * 2, "it was stopped elsewhere"
    run_case(1, "rest", more, tmp_path / "parts")
    assert left_by(parts) == left_by(whole)


HANGS = """import pathlib, sys, time
calls = pathlib.Path(__file__).with_name("calls")
def reward_fn(prompts, responses):
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    print("scoring")  # into a buffer, as stdout is no terminal
    time.sleep(1000 if calls.read_text() == ".." else 0)
    return [float(len(response)) for response in responses]
"""


def test_one_rank_whose_reward_function_hangs_saves_upon_a_signal_and_ends(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    more = PPO.replace("--reward_pretrain {tiny}/reward", f"--reward_fn {tmp_path}/hangs.py").replace(
        "{tiny}", str(tiny)
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "openppo.cli.train_ppo", *more.split(), "--save_path", str(tmp_path / "model")]
    with (
        (tmp_path / "output").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            limit = time.monotonic() + 120
            while not (tmp_path / "calls").exists() or (tmp_path / "calls").read_text() != "..":
                assert process.poll() is None and time.monotonic() < limit, (tmp_path / "output").read_text()
                time.sleep(0.1)
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    said = (tmp_path / "output").read_text()
    assert "stopped by SIGTERM after 1 of 3 steps. The same command with --load_checkpoint continues from" in said
    assert said.count("scoring\n") == 2, "what was printed last got lost"
    assert (tmp_path / "model" / "checkpoints_ppo" / "latest" / "manifest.json").is_file()
    [line] = (tmp_path / "model" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1


def test_options_that_contradict_the_checkpoint_are_an_error_that_names_them(
    tiny: Path, tmp_path: Path, run_case: Callable[..., Path], launch: Callable[..., str]
) -> None:
    save_path = run_case(1, "first", "--save_steps 2", tmp_path / "run", stop_at=2 * STEP + 2)
    command = ["-m", "openppo.cli.train_ppo", *arguments(tiny, "--save_steps 2"), "--load_checkpoint"]
    command += ["--save_path", str(save_path)]
    more = " ".join(["--lora_rank 4 --seed 7 --prompt_data", f"{tiny}/sft.jsonl --input_key input"])
    output = launch(0, *command, *more.split(), status=2)
    error = output.rstrip().splitlines()[-1]
    assert error.startswith(
        f"error: --load_checkpoint: this run contradicts its checkpoint {save_path}/checkpoints_ppo"
    )
    for part in ("--lora_rank was 0, is 4", "--seed was 42, is 7", "--prompt_data was", "choose another --ckpt_path."):
        assert part in error
    output = launch(0, *command, "--prompt_max_len", "8", status=2)
    assert ": --prompt_max_len was 1024, is 8, which gives other rows of --prompt_data. Restore" in output
    harmless = ["--generate_max_len", "9", "--eval_data", tiny / "sft.jsonl"]  # documents are cut elsewhere then
    output = launch(0, *command, *harmless, "--max_ckpt_num", "7", "--micro_train_batch_size", "1")
    assert "in force from now on: --micro_train_batch_size 2 -> 1, --generate_max_len 6 -> 9, --eval_data" in output
    assert "--max_ckpt_num 3 -> 7" in output


def test_the_best_score_is_forgotten_when_the_evaluation_is_another(
    tiny: Path, tmp_path: Path, run_case: Callable[..., Path], launch: Callable[..., str]
) -> None:
    more = f"--num_episodes 2 --save_steps 1 --eval_steps 1 --keep_best eval_reward --eval_data {tiny}/prompts.jsonl"
    save_path = run_case(1, "first", more, tmp_path / "run", stop_at=2 * (STEP + 2) + 2)
    command = ["-m", "openppo.cli.train_ppo", *arguments(tiny, more), "--save_path", str(save_path)]
    output = launch(0, *command, "--load_checkpoint", "--eval_data", tiny / "sft.jsonl")
    assert "--eval_data changed: the best model is looked for anew" in output
    assert "the best model so far, eval_reward" in output.split("resuming from")[1]
