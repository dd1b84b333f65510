"""Ranks that sample beside ranks that train: equal numbers, bounds, faults, resume.

Launched by torchrun, this file runs train_ppo and writes the groups of each batch to ``batches.jsonl``.
"""

import itertools
import json
import os
import re
import signal
import socket
import stat
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import psutil
import pytest

from openppo.cli import train_ppo
from openppo.sources.asynchronous import AsyncSource
from openppo.strategy.links import Entrance, Link
from openppo.types import segments_of
from tests.distributed import runs
from tests.distributed.runs import left_by, logged, rows, vector
from tests.distributed.watched import HERE, Ended, rank_process, torchrun
from tests.fork_server import Launcher

_STRANGERS: list[socket.socket] = []
REWARD = """
def reward_fn(responses):
    return [response.count("a") / (1 + len(response)) for response in responses]
"""
OPTIONS = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --reward_fn reward.py --n_samples_per_prompt 2
    --rollout_batch_size 4 --train_batch_size 8 --micro_train_batch_size 2 --micro_rollout_batch_size 4
    --generate_max_len 6 --advantage_estimator group_norm --actor_learning_rate 1e-3 --init_kl_coef 0.1 --max_steps 6
    --num_episodes 2 --save_path model"""


def main() -> None:
    """Run train_ppo; with OPENPPO_KILL_AFTER rank 0 kills itself instead of asking for a batch after so many steps.

    With OPENPPO_SILENT "strangers" connect to the coordinator before its workers do, and stay; a "worker" connects and
    does not say which rank it is.
    """
    take, kill_after = AsyncSource._batch, int(os.environ.get("OPENPPO_KILL_AFTER", "-1"))

    def batch(source: AsyncSource, n_groups: int):
        if source.coordinator is not None and source.version == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        groups, metrics = take(source, n_groups)
        if source.coordinator is not None:
            segments = segments_of(list(itertools.chain.from_iterable(groups)))
            oldest = min(v for segment in segments for v in segment.versions if v >= 0)
            row = {
                "version": source.version,
                "oldest": oldest,
                "groups": [group[0].group for group in groups],
            }
            with open("batches.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        return groups, metrics

    replaced = {
        "strangers": (Entrance, "__init__", beset),
        "worker": (Link, "send", lambda link, message: None),
    }
    silent = replaced.get(os.environ.get("OPENPPO_SILENT", ""))
    with mock.patch.object(AsyncSource, "_batch", batch), ExitStack() as stack:
        if silent is not None:
            stack.enter_context(mock.patch.object(*silent))
        train_ppo.main()


def ports() -> set[int]:
    """TCP ports on which this process listens."""
    return {
        each.laddr.port
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def beset(entrance: Entrance, *arguments: object, build=Entrance.__init__) -> None:
    """Build ``entrance``, and open silent connections to it for as long as the process lasts."""
    before = ports()
    build(entrance, *arguments)
    opened = ports() - before
    connections = [socket.create_connection(("127.0.0.1", port)) for port in opened]
    if Path(entrance.address).is_socket():
        connections.append(socket.socket(socket.AF_UNIX))
        connections[-1].connect(entrance.address)
    _STRANGERS.extend(connections)
    mode = stat.S_IMODE(Path(entrance.address).parent.stat().st_mode)
    print(
        f"silent connections: {len(connections)}, ports: {len(opened)}, mode: {mode:o}", flush=True
    )


@pytest.fixture
def train(tiny: Path, tmp_path: Path, launcher: Launcher):
    """``train(name, ranks, options)`` runs in a folder of that name, which it returns."""

    def run(name: str, ranks: int, options: str = "", status: int = 0, **variables: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "reward.py").write_text(REWARD)
        common = OPTIONS.replace("--rollout_batch_size 4", "") if "--n_envs" in options else OPTIONS
        words = f"{common} {options}".replace("{tiny}", str(tiny)).split()
        done = launcher.run([__file__, *words], ranks, cwd=folder, **variables)
        assert done.returncode == status or (status and done.returncode), done.stdout
        (folder / "output").write_text(done.stdout)
        return folder

    return run


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics that a synchronous run has too."""
    own = ("async/", "stale/", "agent/prefix_reuse")
    return [
        {k: v for k, v in row.items() if not k.startswith(own)} for row in logged(folder / "model")
    ]


def test_staleness_0_on_a_rollout_rank_gives_the_synchronous_run(train):
    """C2, with a checkpoint at the end: difference 0."""
    once, apart = train("once", 1), train("apart", 2, "--rollout_ranks 1")
    assert numbers(apart) == numbers(once)
    assert len(numbers(apart)) == 6
    ours, theirs = left_by(apart / "model"), left_by(once / "model")
    assert ours.files == theirs.files
    assert (ours.samples, ours.tokens) == (theirs.samples, theirs.tokens)


IMAGES = "--pretrain {tiny}/llava --prompt_data {tiny}/llava/images.jsonl --image_key images"
AGENT = " --agent {tiny}/llava/gallery.py:solve --apply_chat_template"
SIDES = [
    ("0", ""),
    ("3", ""),
    pytest.param("1", "", marks=pytest.mark.slow),
    pytest.param("2", "", marks=pytest.mark.slow),
    pytest.param("2", "--lora_rank 2", marks=pytest.mark.slow),
    ("3", "--lora_rank 2"),
    ("3", IMAGES),
    ("2", "--pretrain {tiny}/llava" + AGENT),
]


@pytest.mark.parametrize(("stage", "more"), SIDES)
def test_samplers_have_the_trained_weights_in_each_stage(train, stage, more):
    """A rank that samples for two gives what these sample themselves, up to the order of floating-point operations."""
    options = f"--zero_stage {stage} {more} --old_log_probs recompute"
    here, there = train("here", 2, options), train("there", 3, f"{options} --rollout_ranks 1")
    for ours, theirs in itertools.zip_longest(numbers(there), numbers(here)):
        assert ours.keys() == theirs.keys()
        for name in ("reward", "kl", "entropy", "policy_loss", "actor_grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    if "--lora_rank" not in more:
        assert (vector(there / "model") - vector(here / "model")).abs().max() < 1e-4


AHEAD = [
    ("on 1 + 1", 2, "--rollout_ranks 1 --max_staleness 1"),
    (
        "on 2 + 1, every 2",
        3,
        "--rollout_ranks 1 --max_staleness 2 --sync_every 2 --running_requests drain",
    ),
    pytest.param(
        "on 1 + 2",
        3,
        "--rollout_ranks 2 --max_staleness 1 --bf16 --zero_stage 2",
        marks=pytest.mark.slow,
    ),
    ("in turn", 1, f"--max_staleness 2 --config {runs.OPTIONS}/reset_optimizer.yaml"),
    ("in turn on 2, in lockstep", 2, "--max_staleness 1 --zero_stage 3 --running_requests abort"),
    pytest.param(
        "reward model",
        3,
        "--rollout_ranks 1 --max_staleness 1 --zero_stage 3",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "ranks", "options"), AHEAD)
def test_sampling_runs_ahead_within_the_bound(train, tiny, name, ranks, options):
    if name == "reward model":
        options += f" --reward_fn None --reward_pretrain {tiny}/reward"
    folder = train("run", ranks, options)
    bound, batches = (
        int(re.search(r"max_staleness (\d)", options)[1]),
        rows(folder / "batches.jsonl"),
    )
    assert [batch["version"] for batch in batches] == list(range(6))
    assert all(batch["version"] - batch["oldest"] <= bound for batch in batches)
    trained = [number for batch in batches for number in batch["groups"]]
    assert len(trained) == len({*trained}) == 24
    metrics = numbers(folder)
    assert max(row["staleness_max"] for row in metrics) <= bound
    assert any(row["staleness_max"] > 0 for row in metrics)
    assert all("masked_high_fraction" in row for row in metrics), "the loss is decoupled"


DYNAMIC = [
    ("on 2 + 1", 3, "--rollout_ranks 1 --max_staleness 1 --zero_stage 3"),
    ("in turn", 1, "--max_staleness 1"),
]


@pytest.mark.parametrize(("name", "ranks", "options"), DYNAMIC)
def test_dynamic_sampling_waits_for_the_scores_of_a_reward_model(train, tiny, name, ranks, options):
    """Responses are short and alike, so that some groups have equal rewards; others take their places."""
    options += f" --reward_fn None --reward_pretrain {tiny}/reward --dynamic_sampling"
    options += " --advantage_estimator rloo --n_samples_per_prompt 2 --train_batch_size 8"
    folder = train("run", ranks, options + " --generate_max_len 1 --temperature 0.3")
    metrics = logged(folder / "model")
    assert [row["consumed_samples"] for row in metrics] == [8 * step for step in range(1, 7)]
    assert all(row["groups_without_signal"] == 0 for row in metrics)

    taken = [number for batch in rows(folder / "batches.jsonl") for number in batch["groups"]]
    assert len(taken) == len({*taken}) > 24, "some taught nothing"
    assert metrics[-1]["async/filtered_groups"] > 0


def test_a_killed_run_resumes_without_training_a_group_twice(train):
    options = "--rollout_ranks 1 --max_staleness 2 --save_steps 2 --load_checkpoint"
    folder = train("run", 3, options, status=1, OPENPPO_KILL_AFTER="3")
    state = json.loads((folder / "model/checkpoints_ppo/latest/state.json").read_text())
    assert state["step"] == 2
    before = [batch for batch in rows(folder / "batches.jsonl") if batch["version"] < 2]
    (folder / "batches.jsonl").unlink()
    train("run", 3, options)
    after = rows(folder / "batches.jsonl")
    assert [batch["version"] for batch in after] == [2, 3, 4, 5]
    trained = [number for batch in [*before, *after] for number in batch["groups"]]
    assert len(trained) == len({*trained}) == 24
    kept = [group["start"]["number"] for group in state["trainer"]["source"]["groups"]]
    assert kept, "complete groups are in the checkpoint"
    assert {*kept} <= {*trained}, "nothing accepted is lost"
    assert all(batch["version"] - batch["oldest"] <= 2 for batch in after)


def test_agents_play_on_ranks_of_their_own_and_in_turn(train, tiny):
    game = f"""--environment {tiny}/game.py:Game --pretrain {tiny}/chat --n_envs 4 --max_turns 3 --episode_max_len 100
        --generate_max_len 4 --prompt_data= --reward_fn None --max_staleness 1 --eval_n_envs 2 --eval_steps 3"""
    for name, ranks, more in (("apart", 2, "--rollout_ranks 1"), ("in turn", 1, "")):
        folder = train(name, ranks, f"{game} {more}")
        metrics = logged(folder / "model")
        assert len(metrics) == 6
        assert all(row["agent/turns"] >= 1 for row in metrics)
        assert [row["step"] for row in metrics if "eval_reward" in row] == [3, 6]
        assert all(row["staleness_max"] <= 1 for row in metrics)


AGENT = """
async def solve(task, session):
    turn = await session.chat(task.messages)
    return {"right": float("a" in turn.text), "short": -0.5}
"""


@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ""), (1, "--max_staleness 1"), (2, "--rollout_ranks 1")]
)
def test_weights_name_the_rewards_of_an_agent(train, tiny, tmp_path, ranks, more):
    (tmp_path / "agent.py").write_text(AGENT)
    flags = f"--agent {tmp_path}/agent.py:solve --pretrain {tiny}/chat --apply_chat_template --reward_fn None {more}"
    flags += f" --max_steps 1 --eval_data {tiny}/prompts.jsonl"
    (row,) = logged(train("right", ranks, f"{flags} --reward_weights right=3 short=2") / "model")
    assert row["reward"] == pytest.approx(3 * row["reward/right"] - 1)
    assert row["eval_reward"] == pytest.approx(3 * row["eval_reward/right"] - 1)
    folder = train("wrong", ranks, f"{flags} --reward_weights rihgt=3", status=1)
    error = "--reward_weights names rihgt, but the rewards are right, short. Use their names."
    assert error in (folder / "output").read_text()


def silent_run(tiny: Path, folder: Path, more: str) -> Ended:
    """A run of two steps, with one rank on each side."""
    words = options(tiny, folder, f"--max_steps 2 {more}")
    return torchrun("test_asynchronous.py", *words, cwd=folder)


def test_silent_connections_do_not_stop_a_run(tiny, tmp_path, monkeypatch):
    """Connections to ports, which any user can open, and to the socket, which only this one can."""
    monkeypatch.setenv("OPENPPO_SILENT", "strangers")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    ended = silent_run(tiny, tmp_path, "")
    assert ended.status == 0, ended.output
    assert "silent connections: 1, ports: 0, mode: 700" in ended.output
    assert len(logged(tmp_path / "model")) == 2
    assert list((tmp_path / "tmp").glob("openppo-*")) == []


def test_a_worker_that_stays_away_is_a_stall(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPPO_SILENT", "worker")
    ended = silent_run(tiny, tmp_path, "--stall_timeout 5")
    assert ended.status != 0
    assert re.search(
        r"rank 0 made no progress for \d+ s \(--stall_timeout\)", ended.row("fault")
    ), ended.output


def options(tiny: Path, folder: Path, more: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    return f"{OPTIONS} --rollout_ranks 1 --max_staleness 1 {more}".replace(
        "{tiny}", str(tiny)
    ).split()


SLOW, SILENT = pytest.mark.slow, "--heartbeat_timeout 12"
STALLS = "--stall_timeout 15"
FAULTS = [
    ("kill", 2, "generation", 2, "rollout rank 2 is gone: its process has ended", ""),
    ("kill", 0, "training", 2, "rank 0 is gone: its process has ended", ""),
    pytest.param("kill", 1, "training", 1, "rank 1 is gone: its process has ended", "", marks=SLOW),
    ("raise", 2, "generation", 2, "rollout rank 2 raised RuntimeError: planted", ""),
    pytest.param(
        "raise", 1, "experience", 2, "rank 1 raised RuntimeError: planted", "", marks=SLOW
    ),
    ("stop", 2, "generation", 1, "rollout rank 2 is gone: no heartbeat", SILENT),
    pytest.param("stop", 0, "training", 1, "rank 0 is gone: no heartbeat", SILENT, marks=SLOW),
    ("sleep", 2, "generation", 2, "rollout rank 2 made no progress", STALLS),
    pytest.param("sleep", 1, "sync", 1, "rank 1 made no progress", STALLS, marks=SLOW),
]


@pytest.mark.parametrize(("fault", "rank", "phase", "step", "what", "more"), FAULTS)
def test_a_fault_on_either_side_ends_both_with_one_report(
    launcher: Launcher,
    tiny: Path,
    tmp_path: Path,
    fault: str,
    rank: int,
    phase: str,
    step: int,
    what: str,
    more: str,
):
    place = (HERE / "run_faults.py", fault, rank, phase, step, "train_ppo")
    words = [str(word) for word in (*place, *options(tiny, tmp_path, f"{more} --zero_stage 2"))]
    done = launcher.run(words, 3, cwd=tmp_path)
    ended = Ended(words, done.stdout, done.returncode, 0.0)
    assert ended.status != 0
    ended.is_in_time()
    assert what in ended.row("fault")
    assert f"rank {rank}: phase {phase}" in ended.row("where")
    assert ("rollout rank 2: phase" in ended.row("others")) == (rank != 2)


def test_sigterm_saves_and_the_run_resumes(tiny, tmp_path):
    def on_line(line, process):
        if line.startswith("step 2/6"):
            for rank in range(3):
                os.kill(rank_process(process.pid, rank), signal.SIGTERM)

    words = options(tiny, tmp_path, "--load_checkpoint")
    launcher = "torch.distributed.run --standalone --nproc_per_node 3"
    first = torchrun(
        "test_asynchronous.py", *words, cwd=tmp_path, launcher=launcher, on_line=on_line
    )
    assert first.status == 0, first.output
    assert first.output.count("saving a checkpoint, then exiting") == 1
    saved = json.loads((tmp_path / "model/checkpoints_ppo/latest/state.json").read_text())["step"]
    assert 2 <= saved < 6
    second = torchrun("test_asynchronous.py", *words, cwd=tmp_path, launcher=launcher)
    assert second.status == 0, second.output
    batches = {
        row["version"]: row["groups"] for row in rows(tmp_path / "batches.jsonl")
    }  # a dropped step is repeated
    trained = [number for groups in batches.values() for number in groups]
    assert len(trained) == len({*trained}) == 24


ELASTIC = "torch.distributed.run --nproc_per_node 3 --max_restarts 1 --rdzv_backend c10d --rdzv_endpoint localhost:0"


def test_torchrun_starts_both_sides_anew(tiny, tmp_path):
    """A rank that samples is killed; torchrun's store is that of before."""
    words = options(tiny, tmp_path, "--save_steps 1 --load_checkpoint --zero_stage 2")
    place = "kill", 2, "generation", 3, "train_ppo"
    ended = torchrun("run_faults.py", *place, *words, cwd=tmp_path, launcher=ELASTIC)
    assert ended.status == 0, ended.output
    assert len(logged(tmp_path / "model")) == 6


@pytest.mark.slow
def test_deepspeeds_launcher_starts_both_sides(tiny, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        launcher = f"deepspeed.launcher.runner --num_gpus 3 --master_port {probe.getsockname()[1]}"
    ended = torchrun(
        "test_asynchronous.py", *options(tiny, tmp_path, ""), cwd=tmp_path, launcher=launcher
    )
    assert ended.status == 0, ended.output
    assert len(logged(tmp_path / "model")) == 6


if __name__ == "__main__":
    main()
