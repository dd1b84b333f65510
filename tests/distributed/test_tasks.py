"""Several tasks in one run, over real processes: a service that is killed, ratios that change, kill -9 and resume."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.distributed.runs import logged, rows
from tests.distributed.watched import rank_process
from tests.fork_server import REPO, Launcher

SERVICE = REPO / "examples" / "task_service.py"
ASYNCHRONOUS = REPO / "tests" / "distributed" / "test_asynchronous.py"
AGENT = """
import asyncio

async def solve(task, session):
    turn = await session.chat(task.messages)
    await asyncio.sleep(0.05)
    return turn.text.count("a") / 4

async def never(task, session):
    raise RuntimeError("always")
"""
REWARD = """
def reward_fn(responses):
    return [response.count("b") / 4 for response in responses]
"""
TASKS = """
tasks:
  - {name: letters, data: PROMPTS, reward: reward.py, ratio: 0.5, eval_data: PROMPTS}
  - {name: talk, agent: agent.py:solve, data: PROMPTS, ratio: 0.3, group_size: 2, options: {max_turns: 1}}
  - {name: game, ratio: 0.2, retries: 1, options: {environment: GAME}}
"""
OPTIONS = """--pretrain {tiny}/chat --tasks tasks.yaml --rollout_batch_size 8 --train_batch_size 32 --generate_max_len 4
    --n_samples_per_prompt 4 --micro_train_batch_size 8 --micro_rollout_batch_size 8 --advantage_estimator group_norm
    --episode_max_len 100 --init_kl_coef 0.01 --actor_learning_rate 1e-4 --save_path model --apply_chat_template"""


@pytest.fixture
def train(tiny: Path, tmp_path: Path, launcher: Launcher):
    """``train(ranks, options, tasks)`` runs in ``tmp_path``; what it printed."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.py").write_text(REWARD)

    def run(ranks: int, options: str, tasks: str = TASKS, status: int = 0, **variables: str) -> str:
        text = tasks.replace("PROMPTS", str(tiny / "prompts.jsonl")).replace(
            "GAME", f"{tiny}/game.py:Game"
        )
        (tmp_path / "tasks.yaml").write_text(text)
        words = f"{OPTIONS} {options}".replace("{tiny}", str(tiny)).split()
        done = launcher.run([ASYNCHRONOUS, *words], ranks, cwd=tmp_path, **variables)
        assert (done.returncode == 0) == (status == 0), done.stdout
        return done.stdout

    return run


SIDES = [
    (1, "--max_staleness 0"),
    (2, "--rollout_ranks 1 --max_staleness 1"),
    (2, "--max_staleness 1 --zero_stage 3"),
]


@pytest.mark.parametrize(("ranks", "options"), SIDES)
def test_tasks_of_each_form_train_together_in_their_ratios(train, tmp_path, ranks, options):
    train(ranks, f"{options} --max_steps 10 --eval_steps 5")
    metrics = logged(tmp_path / "model")
    assert len(metrics) == 10
    last = metrics[-1]
    for name, ratio in {"letters": 0.5, "talk": 0.3, "game": 0.2}.items():
        assert last[f"task/{name}/ratio"] == ratio
        assert last[f"task/{name}/share"] == pytest.approx(ratio, abs=0.12)
        assert any(f"task/{name}/kl" in row for row in metrics)
        assert all(row.get(f"task/{name}/staleness", 0) <= 1 for row in metrics)
    assert "eval_reward" in last


def test_a_task_that_always_fails_is_left_out(train, tmp_path):
    """B2: quarantine after ten groups, ratios renormalized; the run has all its steps."""
    broken = "  - {name: broken, agent: agent.py:never, data: PROMPTS, ratio: 0.2, retries: 0}\n"
    tasks = TASKS.replace("ratio: 0.5", "ratio: 0.3") + broken
    printed = train(2, "--rollout_ranks 1 --max_staleness 1 --max_steps 12", tasks)
    assert (
        "10 groups of task broken in a row failed; the last: agent_error: RuntimeError: always"
        in printed
    )
    assert "the ratios are now: letters 0.375, talk 0.375, game 0.25" in printed
    metrics = logged(tmp_path / "model")
    assert len(metrics) == 12
    assert 10 <= metrics[-1]["task/broken/failed_groups"] < 20, "and those that were under way"
    assert metrics[-1]["task/broken/accepted_episodes"] == 0


def test_a_killed_run_trains_each_group_once(train, tmp_path):
    """B3."""
    options = "--rollout_ranks 1 --max_staleness 2 --max_steps 8 --save_steps 2 --load_checkpoint"
    train(2, options, status=1, OPENPPO_KILL_AFTER="5")
    state = json.loads((tmp_path / "model/checkpoints_ppo/latest/state.json").read_text())
    assert state["step"] == 4
    before = [batch for batch in rows(tmp_path / "batches.jsonl") if batch["version"] < 4]
    (tmp_path / "batches.jsonl").unlink()
    train(2, options)
    after = rows(tmp_path / "batches.jsonl")
    trained = [number for batch in [*before, *after] for number in batch["groups"]]
    assert len(trained) == len({*trained}) == 64
    kept = {group["start"]["number"] for group in state["trainer"]["source"]["groups"]}
    assert kept <= {*trained}
    assert all(batch["version"] - batch["oldest"] <= 2 for batch in after)
    shares = state["trainer"]["source"]["schedule"]["shares"]
    assert (
        logged(tmp_path / "model")[-1]["task/letters/accepted_episodes"]
        > shares["letters"]["accepted"]
    )


def test_fields_of_tasks_changed_before_a_resume_are_named(train, tmp_path):
    options = "--max_staleness 0 --save_steps 1 --load_checkpoint --max_steps"
    assert "edited since" not in train(1, f"{options} 1")
    (tmp_path / "agent.py").write_text(AGENT + "\n# edited\n")
    printed = train(
        1,
        f"{options} 2",
        TASKS.replace("ratio: 0.5", "ratio: 0.4").replace("ratio: 0.3", "ratio: 0.4"),
    )
    (line,) = [line for line in printed.splitlines() if "edited since" in line]
    assert line.partition("files edited since the checkpoint, in force from now on: ")[2].split(
        ", "
    ) == [
        "--agent of task talk agent.py",
        "--tasks: task letters: ratio 0.5 -> 0.4",
        "--tasks: task talk: ratio 0.3 -> 0.4",
    ]
    assert logged(tmp_path / "model")[-1]["task/talk/ratio"] == 0.4


def serve(port: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, SERVICE, "--port", str(port)])
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
        except URLError:
            time.sleep(0.02)
        else:
            return process


def ask(folder: Path, path: str = "", body: dict | None = None) -> dict:
    """What the run answers, once it is there."""
    file = folder / "model/logs/tasks.json"
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    assert file.stat().st_mode & 0o077 == 0
    where = json.loads(file.read_text())
    data = None if body is None else json.dumps(body).encode()
    with urlopen(
        Request(where["url"] + path, data, {"Authorization": f"Bearer {where['token']}"}),
        timeout=30,
    ) as answer:
        return json.load(answer)


@contextmanager
def running(folder: Path, words: str):
    """A run that ends well, or is killed in the middle of a step."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    with (folder / "output").open("a") as output:
        command = [*launch, "-m", "openppo.cli.train_ppo", *words.split()]
        run = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield run
        finally:
            run.kill()


def test_a_service_joins_survives_kills_and_resumes(tiny, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "tasks.yaml").write_text(
        f"tasks: [{{name: letters, data: {tiny}/prompts.jsonl, reward: reward.py}}]"
    )
    (tmp_path / "reward.py").write_text(REWARD)
    joins = {
        "name": "service",
        "agent": f"http://127.0.0.1:{port}",
        "data": f"{tiny}/prompts.jsonl",
    }
    joins |= {"ratio": 0.5, "timeout": 3, "retries": 3}
    more = "--rollout_ranks 1 --max_staleness 1 --max_steps 36 --save_steps 4 --load_checkpoint"
    words = f"{OPTIONS} {more}".replace("{tiny}", str(tiny))
    service = serve(port)
    with running(tmp_path, words) as run:
        assert ask(tmp_path, "", joins)["ratio"] == 0.5
        while ask(tmp_path)["service"]["accepted_episodes"] < 8:
            time.sleep(0.02)
        service.kill()
        service.wait()
        changed = ask(tmp_path, "/service", {"ratio": 0.8, "max_concurrent": 64})
        assert changed["ratio"] == 0.8
        service = serve(port)
        newest, state = tmp_path / "model/checkpoints_ppo/latest/state.json", ""
        while '"service"' not in state:
            time.sleep(0.05)
            state = newest.read_text() if newest.exists() else ""
        for rank in range(2):
            os.kill(rank_process(run.pid, rank), signal.SIGKILL)
        assert run.wait(60) != 0
    (tmp_path / "model/logs/tasks.json").unlink()
    with running(tmp_path, words) as run:
        while "service" not in ask(tmp_path):  # until the checkpoint is read
            time.sleep(0.05)
        assert ask(tmp_path)["service"]["ratio"] == 0.5, "as it has joined"
        ask(tmp_path, "/service", {"ratio": 0.8})
        assert run.wait(300) == 0, (tmp_path / "output").read_text()
    service.kill()
    service.wait()
    metrics = logged(tmp_path / "model")
    assert len(metrics) == 36
    assert metrics[-1]["task/letters/ratio"] == pytest.approx(0.2)
    assert metrics[-1]["task/service/share"] > 0.5
    assert metrics[-1]["task/service/failed_groups"] == 0
    assert not (tmp_path / "model/logs/tasks.json").exists(), "the token is of no more use"
