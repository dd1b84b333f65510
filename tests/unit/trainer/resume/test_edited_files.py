"""Files that were edited in place between a run and its resume are named in the log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from openppo.config import TrainPPOConfig, TrainSFTConfig, flat_dict, from_options
from openppo.config.fields import Options
from openppo.sources.task import Task
from openppo.trainer.resume.compatible import check_compatible
from openppo.trainer.resume.edited_files import user_files

START = "files edited since the checkpoint, in force from now on: "
TASKS = """
tasks:
  - {name: sums, data: sums.jsonl, reward: exact_match, ratio: 0.5, options: {max_turns: 4}}
  - {name: games, agent: "http://user:key@host/play", ratio: 0.5}
"""


def config_of(**options: Any) -> TrainPPOConfig:
    return from_options(TrainPPOConfig, **{"pretrain": "m", **options})


def logged(
    config: Options, saved: Any, caplog: pytest.LogCaptureFixture, *tasks: Task
) -> list[str]:
    """Lines about edited files of a run that resumes from a checkpoint with these ``saved`` files, or none."""
    identity: dict[str, Any] = {"kind": "ppo", "options": flat_dict(config), "contents": {}}
    before = json.loads(json.dumps(identity | ({} if saved is None else {"user_files": saved})))
    caplog.clear()
    with caplog.at_level(logging.INFO, "openppo"):
        check_compatible(
            Path("ckpt/step_1"), before, identity | {"user_files": user_files(config, tasks)}
        )
    return [line.removeprefix(START) for line in caplog.messages if line.startswith(START)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "reward.py",
        "agent.py",
        "rows.py",
        "game.py",
        "remote.py",
        "judge.py",
        "play.py",
        "tool.py",
    ):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "reward.py").write_text("import shared\n")
    (tmp_path / "shared.py").write_text("x = 1\n")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    tools = (
        "tools: [{class_name: tool.Tool, config: {command: [python, server.py], key: secret}}]\n"
    )
    (tmp_path / "mcp.yaml").write_text(tools)
    (tmp_path / "server.py").write_text("x = 1\n")
    (tmp_path / "tasks.yaml").write_text(TASKS)
    return tmp_path


@pytest.mark.parametrize(
    ("option", "value", "edited"),
    [
        ("reward_fn", "reward.py:score", "reward.py"),
        ("reward_fn", "reward.py", "shared.py"),
        ("remote_rm_url", "remote.py", "remote.py"),
        ("eval_reward_fn", "judge.py", "judge.py"),
        ("agent", "agent.py:solve", "agent.py"),
        ("agent_command", "python -u play.py --level {level}", "play.py"),
        ("environment", "game.py:Game", "game.py"),
        ("dataset_class", "rows.py:Rows", "rows.py"),
        ("tools", "tool.py", "tool.py"),
        ("tools", "mcp.yaml", "mcp.yaml"),
        ("tools", "mcp.yaml", "tool.py"),
        ("tools", "mcp.yaml", "server.py"),
        ("chat_template", "template.jinja", "template.jinja"),
        ("policy_loss_type", "judge.py:loss", "judge.py"),
        ("advantage_estimator", "reward.py:estimator", "shared.py"),
        ("kl_controller", "judge.py:Controller", "judge.py"),
        ("prompt_order", "judge.py:order", "judge.py"),
    ],
)
def test_a_file_edited_in_place_is_named_on_resume(
    folder: Path, caplog: pytest.LogCaptureFixture, option: str, value: str, edited: str
) -> None:
    config = config_of(**{option: value})
    saved = user_files(config)
    assert logged(config, saved, caplog) == []
    (folder / edited).touch()
    assert logged(config, saved, caplog) == [], "the same content"
    with (folder / edited).open("a") as file:
        file.write("# other\n")
    assert logged(config, saved, caplog) == [f"--{option} {edited}"]


def test_each_changed_field_of_a_task_is_named_with_both_values(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tasks="tasks.yaml")
    saved = user_files(config)
    assert "key" not in json.dumps(saved), "secrets in addresses are masked"
    text = TASKS.replace(
        "ratio: 0.5, options: {max_turns: 4}", "ratio: 0.3, options: {max_turns: 8}, retries: 1"
    )
    (folder / "tasks.yaml").write_text("# a comment\n" + text.replace("ratio: 0.5}", "ratio: 0.7}"))
    fields = [
        "--tasks: task sums: ratio 0.5 -> 0.3",
        "--tasks: task sums: options.max_turns 4 -> 8",
        "--tasks: task sums: retries (not given) -> 1",
        "--tasks: task games: ratio 0.5 -> 0.7",
    ]
    assert logged(config, saved, caplog) == [", ".join(fields)]
    (folder / "tasks.yaml").write_text(TASKS.replace("games", "chess"))
    assert logged(config, saved, caplog) == [
        "--tasks: task games is gone, --tasks: task chess is new"
    ]


def test_a_file_of_one_task_is_named_with_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tasks="tasks.yaml", dataset_class="rows.py:Rows")
    task = Task("sums", config_of(reward_fn="reward.py", dataset_class="rows.py:Rows"))
    saved = user_files(config, [task])
    for name in ("reward.py", "rows.py"):
        (folder / name).write_text("import shared\nx = 2\n")
    assert logged(config, saved, caplog, task) == [
        "--dataset_class rows.py, --reward_fn of task sums reward.py"
    ]


def test_checkpoints_without_hashes_resume_without_a_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged(config_of(reward_fn="reward.py", tasks="tasks.yaml"), None, caplog) == []


def test_what_is_no_file_has_no_hash(folder: Path) -> None:
    options = {
        "reward_fn": "(given in Python)",
        "remote_rm_url": "http://host/reward.py",
        "agent_command": "x " * 500,
    }
    assert user_files(config_of(**options))["hashes"] == {f"--{name}": {} for name in options}
    config = from_options(TrainSFTConfig, pretrain="m", dataset="d", dataset_class="rows.py:Rows")
    assert list(user_files(config)["hashes"]["--dataset_class"]) == ["rows.py"]


def test_a_file_that_cannot_be_compiled_has_a_hash_all_the_same(folder: Path) -> None:
    (folder / "reward.py").write_text("def (\n")
    assert list(user_files(config_of(reward_fn="reward.py"))["hashes"]["--reward_fn"]) == [
        "reward.py"
    ]
