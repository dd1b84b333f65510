"""Runs whose episodes fail end with a report that quotes the error, and with a checkpoint to resume from."""

import json
import shlex
import sys

import pytest
import torch

from tests.distributed.runs import logged, vector
from tests.distributed.test_agent_programs import chat_model  # noqa: F401 (a fixture)

OPTIONS = """--pretrain {model} --prompt_data tasks.jsonl --input_key question --save_path trained
    --advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 4 --train_batch_size 8
    --generate_max_len 8 --episode_max_len 160 --init_kl_coef 0 --num_episodes 4"""

AGENT = """
import asyncio

async def raises(task, session):
    await session.chat(task.messages)
    raise LookupError(f"no door in {task['question']}")

async def cancels(task, session):
    await session.chat(task.messages)
    for each in asyncio.all_tasks():
        each.cancel()
    await asyncio.sleep(1)

async def works(task, session):
    await session.chat(task.messages)
"""
BROKEN = "import sys; sys.stderr.write('reading the settings\\n'); import no_such_module"
ASYNC = "--max_staleness 1 --policy_loss_type decoupled"
SLOW_ASYNC = pytest.param(ASYNC, marks=pytest.mark.slow)
NO_DOOR = "LookupError: no door in room "
NO_MODULE = "ModuleNotFoundError: No module named 'no_such_module'"
CANCELLED = "cancelled: its own code, or a library that it uses, cancelled it"


def write_rooms(place, number):
    (place / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"room {i}"}) + "\n" for i in range(number))
    )


@pytest.fixture
def folder(tmp_path, chat_model):  # noqa: F811
    """A folder with tasks, agents, and the flags that all runs share."""
    write_rooms(tmp_path, 8)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path, OPTIONS.format(model=chat_model).split()


def program(file):
    return ["--agent_command", f"{shlex.quote(sys.executable)} {file}"]


@pytest.mark.parametrize(
    ("ranks", "agent", "flags", "error"),
    [
        pytest.param(
            1,
            ["--agent_command", "false"],
            "",
            "ProgramError: exit status 1: no output",
            id="false",
        ),
        pytest.param(1, ["--agent", "agent.py:cancels"], "", CANCELLED, id="cancels"),
        pytest.param(
            2,
            ["--agent", "agent.py:raises"],
            f"--rollout_ranks 1 {ASYNC}",
            NO_DOOR,
            id="rollout_ranks",
        ),
        pytest.param(2, program("broken.py"), "", NO_MODULE, id="import", marks=pytest.mark.slow),
        pytest.param(
            2, ["--agent", "agent.py:raises"], "", NO_DOOR, id="coroutine", marks=pytest.mark.slow
        ),
        pytest.param(
            2, ["--agent", "agent.py:raises"], ASYNC, NO_DOOR, id="overlap", marks=pytest.mark.slow
        ),
        pytest.param(
            1,
            ["--agent", "agent.py:cancels"],
            ASYNC,
            CANCELLED,
            id="overlap cancels",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_whose_episodes_all_fail_ends_with_their_error(
    folder, launch, ranks, agent, flags, error
):
    place, options = folder
    printed = launch(
        ranks, "-m", "openppo.cli.train_ppo", *options, *agent, *flags.split(), cwd=place, status=1
    )
    report = printed[printed.index("OpenPPO: the run has failed") :]
    assert error in report
    assert "saved the trained model" not in printed and "stopped by" not in printed
    assert (place / "trained" / "checkpoints_ppo" / "latest" / "state.json").exists()
    assert "--load_checkpoint" in report
    failed = logged(place / "trained", "samples")
    assert failed and all(error in f"{row['ending']}: {row['error']}" for row in failed)
    assert "no_such_module" in failed[-1]["output"] or "broken.py" not in str(agent)
    assert error.split(": ")[-1] in (place / "trained" / "logs" / "report.html").read_text()


@pytest.mark.parametrize("flags", ["", SLOW_ASYNC])
def test_a_run_whose_groups_teach_nothing_ends_after_a_checkpoint(folder, launch, flags):
    place, options = folder
    (place / "agent.py").write_text(AGENT + "    return 1.0\n")
    flags = f"{flags} --dynamic_sampling 2".split()
    command = ["-m", "openppo.cli.train_ppo", *options, "--agent", "agent.py:works", *flags]
    printed = launch(1, *command, cwd=place, status=1)
    report = printed[printed.index("OpenPPO: the run has failed") :]
    assert (
        "--dynamic_sampling: " in report
        and "Mend the cause; --load_checkpoint resumes from" in report
    )
    assert "saved the trained model" not in printed


SOMETIMES = """
import itertools, pathlib

PLAYED = itertools.count()

async def solve(task, session):
    answer = await session.chat(task.messages)
    if (next(PLAYED) >= 72 and pathlib.Path("broken").exists()) or task["question"] in ("room 1", "room 6"):
        raise LookupError(f"no door in {task['question']}")
    return float(len(answer.text))
"""


@pytest.mark.parametrize(
    "flags", [pytest.param("", marks=pytest.mark.slow), f"--rollout_ranks 1 {ASYNC}"]
)
def test_a_step_logs_failed_episodes_of_any_rank(folder, launch, flags):
    place, options = folder
    (place / "agent.py").write_text(SOMETIMES)
    command = ["-m", "openppo.cli.train_ppo", *options, "--agent", "agent.py:solve", *flags.split()]
    printed = launch(2, *command, cwd=place)
    assert "saved the trained model" in printed
    rows = logged(place / "trained", "samples")
    failed = [row for row in rows if row["ending"] == "agent_error"]
    errors = {row["error"] for row in failed}
    assert errors == {f"LookupError: no door in room {i}" for i in (1, 6)}
    assert {(row["turns"], len(row["messages"]), row["reward"]) for row in failed} == {(1, 2, 0.0)}
    assert all(row["ending"] == "completed" for row in rows if row["sample"] == 0), (
        "failed ones come last"
    )


@pytest.mark.parametrize("flags", ["", SLOW_ASYNC])
def test_a_run_that_failures_end_resumes_before_that_step(folder, launch, flags):
    """The agent works again: what follows is as in a run that never failed, where nothing is asynchronous."""
    place, options = folder
    write_rooms(place, 24)
    (
        options[options.index("--rollout_batch_size") + 1],
        options[options.index("--train_batch_size") + 1],
    ) = "12", "24"
    (place / "agent.py").write_text(SOMETIMES)
    command = ["-m", "openppo.cli.train_ppo", *options, "--agent", "agent.py:solve", *flags.split()]
    launch(1, *command, "--save_path", "whole", cwd=place)
    (place / "broken").touch()
    printed = launch(1, *command, cwd=place, status=1)
    assert (
        "raised openppo.rollout.failures.NothingTrainedError: 10 groups in a row failed; the last: "
        in printed
    )
    (place / "broken").unlink()
    launch(1, *command, "--load_checkpoint", cwd=place)
    assert [line["step"] for line in logged(place / "trained")] == list(range(1, 9))
    if not flags:
        assert torch.equal(vector(place / "trained"), vector(place / "whole"))
