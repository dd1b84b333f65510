"""Tasks files: what they say, and one message for what is wrong. Samples and rewards go to the task they belong to."""

import json
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from openppo.config import TrainPPOConfig, from_options
from openppo.rewards.scoring import TaskScorer
from openppo.sources.progress import by_speed
from openppo.sources.task_file import TaskFields, read_tasks, task_source
from openppo.sources.task_server import TaskServer
from openppo.types import Completion, EpisodeInput, FinishReason, Prompt, Sample, Score

TOOLS = """
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema

class Pay(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema(function={"name": "pay"})

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0
"""
MINIMAL = {"name": "one", "data": "rows.jsonl", "reward": "exact_match"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("async def solve(task, session): return 1.0")
    Path("tools.py").write_text(TOOLS)
    Path("ratios.py").write_text("def mine(shares): return {name: 1.0 for name in shares}")
    return from_options(
        TrainPPOConfig, pretrain="MODEL", max_steps=3, generate_max_len=64, agent_timeout=9.0
    )


def source(config, *rows, **options):
    Path("tasks.yaml").write_text(yaml.safe_dump({"tasks": list(rows)}))
    given = {
        "pretrain": "MODEL",
        "max_steps": 3,
        "generate_max_len": 64,
        "agent_timeout": 9.0,
        "tasks": "tasks.yaml",
    }
    return task_source(from_options(TrainPPOConfig, **given, **options))


def test_a_task_has_the_options_of_the_run_and_its_own(config):
    talk = {
        "name": "talk",
        "agent": "agent.py:solve",
        "data": "t.jsonl",
        "group_size": 3,
        "max_concurrent": 5,
    }
    talk |= {
        "timeout": 4,
        "retries": 0,
        "options": {"max_turns": 2, "label_key": "x"},
        "eval_data": "e.jsonl",
    }
    one, two = source(
        config, MINIMAL | {"sampling": {"generate_max_len": 8, "stop": ["\n"]}}, talk
    ).tasks
    assert (one.config.data.prompt_data, one.config.rewards.verifiable_reward) == (
        "rows.jsonl",
        ("exact_match",),
    )
    assert (one.config.generation.generate_max_len, one.config.generation.stop) == (8, ("\n",))
    assert (one.config.agents.agent_timeout, one.players, one.ratio, one.retries) == (
        9.0,
        None,
        0.5,
        2,
    )
    assert (
        two.config.agents.agent_timeout,
        two.config.agents.max_turns,
        two.config.data.label_key,
    ) == (4, 2, "x")
    assert (two.config.evaluation.eval_data, two.config.generation.generate_max_len) == (
        "e.jsonl",
        64,
    )
    assert (two.progress.group_size, two.progress.max_concurrent, two.retries) == (3, 5, 0)
    assert two.players.options.agent_timeout == 4
    assert not two.is_scored


def test_the_weights_of_a_run_may_name_rewards_of_any_task(config):
    talk = {"name": "talk", "agent": "agent.py:solve", "data": "t.jsonl"}
    weights = ["reward=0.5", "won=2"]
    tasks = source(config, MINIMAL, talk, reward_weights=weights).tasks
    assert [task.config.rewards.weights() for task in tasks] == [{"reward": 0.5, "won": 2.0}] * 2


def test_objects_of_ones_own_are_tasks_too(config):
    async def solve(task: EpisodeInput, session):
        return 1.0

    tasks = [
        TaskFields(name="a", agent=solve, data="a.jsonl", ratio=0.25),
        TaskFields(name="b", data="b", reward="length:3", ratio=0.75),
    ]
    made = task_source(config, tasks, by_speed)
    assert [(task.name, task.ratio) for task in made.tasks] == [("a", 0.25), ("b", 0.75)]
    assert made.ratios is by_speed


WRONG = [
    (
        [{**MINIMAL, "color": "red"}],
        "task one has no field 'color'; fields are name, agent, data, reward, ratio",
    ),
    ([{"data": "x"}], "task number 1 needs a name"),
    ([{**MINIMAL, "name": "a/b"}], "'a/b' is no name of a task"),
    ([MINIMAL, MINIMAL], "two tasks have the name 'one'"),
    (
        [{**MINIMAL, "ratio": 0.5}, {**MINIMAL, "name": "two", "ratio": 0.4}],
        "the ratios sum to 0.9",
    ),
    (
        [{**MINIMAL, "ratio": 0.5}, {**MINIMAL, "name": "two"}],
        "task two has no ratio, and others have",
    ),
    ([{**MINIMAL, "ratio": -1.0}], "the ratio of task one is -1.0"),
    ([{**MINIMAL, "group_size": 0}], "task one: group_size 0: use a whole number of 1 or more"),
    (
        [{**MINIMAL, "options": {"actor_learning_rate": 1}}],
        "task one: options has actor_learning_rate",
    ),
    (
        [{**MINIMAL, "sampling": {"temperature": 1}}],
        "task one: sampling has temperature, which is the run's",
    ),
    (
        [{**MINIMAL, "sampling": {"generate_max_len": 99}}],
        "longer than the run's --generate_max_len 64",
    ),
    ([{**MINIMAL, "options": {"max_turns": 0}}], "task one: --max_turns"),
    ([{"name": "one", "data": "x"}], "task one: No reward is given"),
    (
        [{"name": "one", "data": "x", "options": {"tools": "tools.py", "tool_rewards": "none"}}],
        "task one: --tool_rewards none: rewards of --tools tools.py are not added. No reward is given",
    ),
    ([{**MINIMAL, "reward": "none"}], "task one: reward none is for a run without --tasks"),
    ([{"name": "one", "reward": "exact_match"}], "task one: it has no data"),
    ([{**MINIMAL, "data": 5}], "task one: data is 5: write a text"),
    ([{**MINIMAL, "options": ["x"]}], "task one: options is ['x']: write options by name"),
    ([{**MINIMAL, "timeout": "soon"}], "task one: timeout is 'soon': write a number of seconds"),
    ([{**MINIMAL, "timeout": -1}], "task one: --agent_timeout"),
    ([], "write 'tasks:' and below it a list"),
]


@pytest.mark.parametrize(("rows", "message"), WRONG)
def test_what_is_wrong_in_a_file_is_named(config, rows, message):
    with pytest.raises(ValueError, match="task") as error:
        source(config, *rows)
    assert message in str(error.value)


def test_a_file_that_is_no_yaml_or_not_there_is_named(config):
    Path("broken.yaml").write_text("tasks: [")
    for name in ("broken.yaml", "none.yaml"):
        with pytest.raises(ValueError, match=f"--tasks {name} cannot be read"):
            read_tasks(Path(name))


def test_ratios_may_follow_a_function(config):
    assert source(config, MINIMAL, task_ratios="speed").ratios is by_speed
    assert source(config, MINIMAL, task_ratios="ratios.py:mine").ratios({"one": None}) == {
        "one": 1.0
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_data": "x.jsonl"}, "its prompt_data too"),
        ({"agent": "agent.py:solve"}, "its agent too"),
        ({"reward_fn": "r.py"}, "its reward too"),
        ({"max_steps": None}, "say --max_steps"),
    ],
)
def test_the_command_line_leaves_to_the_file_what_is_the_files(config, options, message):
    given = {"pretrain": "MODEL", "max_steps": 3, "tasks": "tasks.yaml"} | options
    with pytest.raises(ValueError, match=message):
        from_options(TrainPPOConfig, **given).validate()


def test_each_task_is_scored_by_its_own_source():
    class Fixed:
        collective = False

        def __init__(self, reward):
            self.reward = reward

        def score(self, samples):
            return [Score({"reward": self.reward}) for _ in samples]

    completion = Completion([2], [0.0], [0], finish_reason=FinishReason.STOP)
    samples = [
        Sample.of_response(Prompt("", [1], task=name), completion, i)
        for i, name in enumerate("abcab")
    ]
    scores = TaskScorer({"a": Fixed(1.0), "b": Fixed(2.0), "c": None}).score(samples)
    assert [score.rewards.get("reward") for score in scores] == [1.0, 2.0, None, 1.0, 2.0]


class Control:
    """What a run would answer."""

    def __init__(self):
        self.changes = []

    def progress(self):
        return {"one": {"ratio": 0.5}, "two": {"ratio": 0.5}}

    def change(self, name, ratio, max_concurrent):
        if name not in self.progress():
            raise KeyError(name)
        self.changes.append((name, ratio, max_concurrent))


def test_tasks_are_shown_and_changed_with_the_token_only(tmp_path):
    control, file = Control(), tmp_path / "logs" / "tasks.json"
    server = TaskServer(control, file)
    where = json.loads(file.read_text())

    def ask(path="", body=None, token=where["token"]):
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(
                Request(where["url"] + path, data, {"Authorization": f"Bearer {token}"}), timeout=10
            ) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    assert ask() == (200, control.progress())
    assert ask("/one", {"ratio": 0.25, "max_concurrent": 7}) == (200, {"ratio": 0.5})
    assert ask("/two", {"max_concurrent": 1})[0] == 200
    assert control.changes == [("one", 0.25, 7), ("two", None, 1)]
    for body in (
        {"ratio": 0},
        {"ratio": 1.5},
        {"ratio": "x"},
        {"max_concurrent": 0.5},
        {"ratio": True},
        {},
        {"size": 1},
    ):
        assert ask("/one", body)[0] == 400
    assert ask("/three", {"ratio": 0.5}) == (404, "there is no task 'three'; tasks are one, two.")
    for token in ("", "guess"):
        assert ask(token=token)[0] == ask("/one", {"ratio": 0.5}, token)[0] == 401
    assert len(control.changes) == 2
    server.close()
    assert not file.exists()


LOADER = """
from pathlib import Path
Path("ran").touch()
def rows(source): return [{"prompt": "a"}]
"""
OTHERS = [
    ({"options": {"dataset_class": "loader.py:rows"}}, "dataset_class"),
    ({"options": {"agent": "agent.py:solve"}}, "agent"),
    ({"options": {"tools": "tools.py", "max_turns": 2}}, "tools"),
    ({"options": {"environment": "agent.py:solve"}}, "environment"),
    ({"options": {"agent_command": "touch ran"}}, "agent_command"),
    ({"options": {"reward_fn": "loader.py:rows"}}, "reward_fn"),
    ({"options": {"remote_rm_url": "loader.py"}}, "remote_rm_url"),
    ({"options": {"remote_rm_token_file": "/etc/hostname"}}, "remote_rm_token_file"),
    ({"options": {"chat_template": "/etc/hostname"}}, "chat_template"),
    ({"agent": "agent.py:solve"}, "its address as agent"),
    ({"agent": "loader.py"}, "its address as agent"),
    ({"reward": "loader.py:rows"}, "leave reward out"),
]


@pytest.mark.parametrize(("fields", "named"), OTHERS, ids=[named for _, named in OTHERS])
def test_a_task_that_joins_names_no_file_that_runs(config, tmp_path, fields, named):
    Path("loader.py").write_text(LOADER)
    control, file = Control(), tmp_path / "tasks.json"
    made = source(config, MINIMAL)
    control.register = partial(made.newcomer, None)
    server = TaskServer(control, file)
    where = json.loads(file.read_text())
    joins = {
        "name": "new",
        "agent": "http://127.0.0.1:9",
        "data": "rows.jsonl",
        "ratio": 0.5,
        **fields,
    }
    header = {"Authorization": f"Bearer {where['token']}"}
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(where["url"], json.dumps(joins).encode(), header), timeout=10)
    server.close()
    message = json.load(refused.value)["error"]["message"]
    assert refused.value.code == 400
    assert named in message
    if "reward" not in fields:
        assert "must be in the --tasks file at the start." in message
    assert not Path("ran").exists(), "the file that was named has run"


COMPARES = [{"advantage_estimator": "rloo"}, {"dynamic_sampling": True}]
COMPARES += [{"normalize_reward": "group"}]


@pytest.mark.parametrize("options", COMPARES, ids=lambda options: [*options][-1])
def test_each_task_needs_several_samples_where_they_are_compared(config, options):
    several = MINIMAL | {"group_size": 2}
    source(config, several, several | {"name": "two"}, **options)
    flag = [*options][-1]
    with pytest.raises(ValueError, match=f"task two: --{flag} .* use group_size of at least 2"):
        source(config, several, MINIMAL | {"name": "two"}, **options)
