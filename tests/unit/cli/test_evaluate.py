"""The evaluate command: its table, its lines, and what it says of input that cannot work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from openppo.cli.evaluate import build
from openppo.cli.options import parse_options
from openppo.config import EvaluateConfig
from openppo.jobs.evaluate import EvaluateJob
from openppo.rollout.failures import NothingTrainedError
from openppo.trainer.evaluation.evaluator import evaluation_table

REWARD = """
def reward_fn(response, label, source):
    return {"letters": len(response), "label": label, "extra": {"in a": "/a/" in source}}
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    acc = ground_truth == 2
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": solution_str, "source": data_source}
"""


def write_rows(file: Path, labels: list[int]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        "".join(json.dumps({"input": "abc", "answer": label}) + "\n" for label in labels)
    )
    return file


def test_lines_and_metrics_say_what_the_reward_function_said(models, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    first, second = (
        write_rows(tmp_path / "a" / "test.jsonl", [1, 2]),
        write_rows(tmp_path / "b" / "test.jsonl", [6]),
    )
    arguments = f"""--pretrain {models}/actor --prompt_data {first},{second} --label_key answer --generate_max_len 5
        --reward_fn {tmp_path}/reward.py --reward_weights letters=0 --pass_reward 2 --reward_workers 2
        --output_path {tmp_path}/out.jsonl"""
    job = EvaluateJob(parse_options(EvaluateConfig, arguments.split()))
    metrics = job.evaluate()
    expected = {"eval_reward": 3, "eval/a/test.jsonl/reward": 1.5, "eval/b/test.jsonl/reward": 6}
    expected |= {
        "eval_pass@1": 2 / 3,
        "eval/a/test.jsonl/pass@1": 1 / 2,
        "eval/b/test.jsonl/pass@1": 1,
    }
    expected |= {
        "eval_extra/in a": 2 / 3,
        "eval/a/test.jsonl/extra/in a": 1,
        "eval/b/test.jsonl/extra/in a": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, (source, row, label) in zip(
        lines, [(first, 0, 1), (first, 1, 2), (second, 0, 6)], strict=True
    ):
        expected = {
            "source": str(source),
            "row": row,
            "sample": 0,
            "prompt": "abc",
            "response": lines[0]["response"],
        }
        expected |= {
            "label": label,
            "reward": label,
            "passed": label >= 2,
            "extra": {"in a": float(source == first)},
        }
        expected["rewards"] = {"letters": len(line["response"]), "label": label}
        assert line == expected | {name: line[name] for name in ("finish_reason", "n_tokens")}


def test_a_function_of_verl_evaluates_as_it_is(models, tmp_path):
    (tmp_path / "dapo.py").write_text(VERL)
    rows = write_rows(tmp_path / "rows.jsonl", [1, 2])
    arguments = f"""--pretrain {models}/actor --prompt_data {rows} --label_key answer --generate_max_len 5
        --reward_fn {tmp_path}/dapo.py --output_path {tmp_path}/out.jsonl"""
    metrics = EvaluateJob(parse_options(EvaluateConfig, arguments.split())).evaluate()
    expected = {"eval_reward": 0, "eval_reward_max": 1, "eval_extra/acc": 0.5, "eval_pass@1": 0.5}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any(name.endswith(("pred", "source", "reward/score")) for name in metrics)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    pred = {"pred": lines[0]["response"], "source": str(rows)}
    assert [line["extra"] for line in lines] == [{"acc": 0.0, **pred}, {"acc": 1.0, **pred}]
    assert [line["rewards"] for line in lines] == [{"reward": -1.0}, {"reward": 1.0}]


def test_a_function_that_fails_on_all_samples_ends_the_command(models, tmp_path):
    (tmp_path / "fails.py").write_text("def reward_fn(response):\n    raise KeyError('lost')\n")
    rows = write_rows(tmp_path / "rows.jsonl", [1, 2])
    arguments = f"""--pretrain {models}/actor --prompt_data {rows} --generate_max_len 5 --reward_error_value 0
        --reward_fn {tmp_path}/fails.py --output_path {tmp_path}/out.jsonl"""
    with pytest.raises(
        NothingTrainedError, match=r"raised on all 2 samples.*KeyError\('lost'\) for prompt 'abc'"
    ):
        EvaluateJob(parse_options(EvaluateConfig, arguments.split())).evaluate()
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2, "what was sampled is kept"


def test_the_table_has_a_line_for_each_metric_and_a_column_for_each_source():
    metrics = {"eval_reward": 1 / 3, "eval_pass@1": 0.25, "eval_reward/bonus": 2.0}
    metrics |= {"eval/math/reward": 0.5, "eval/math/pass@1": 0.5, "eval/math/reward/bonus": 2.0}
    metrics |= {"eval/a long name/reward": 0.0, "eval/a long name/pass@1": 0.0}
    assert evaluation_table(metrics, ["math", "a long name", "math"]) == [
        "              all     a long name  math",
        "prompts       3       1            2",
        "reward        0.3333  0.0000       0.5000",
        "pass@1        0.2500  0.0000       0.5000",
        "reward/bonus  2.0000  -            2.0000",
    ]
    alone = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    assert evaluation_table(alone, ["math"] * 2)[:2] == ["              all", "prompts       2"]


AGENT = """
async def solve(task, session):
    first = await session.chat(task.messages)
    await session.chat([*task.messages, first.message, {"role": "user", "content": "b"}])
    if task["answer"] == "2":
        raise RuntimeError("broken")
    return {"won": 1.0}
"""
GAME = """
class Game:
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return "a", {}
    def step(self, action):
        return "b", self.seed, True, False, {}
    def close(self):
        pass
"""
CHAT = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture
def evaluate(models, tmp_path):
    """Evaluates with the flags of an agent; metrics and lines."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "seed.yaml").write_text("eval_seed: 5\n")
    shutil.copytree(models / "actor", tmp_path / "chat")
    (tmp_path / "chat/chat_template.jinja").write_text(CHAT)

    def run(flags: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        common = f"--pretrain {tmp_path}/chat --generate_max_len 5 --prompt_max_len 40 --output_path {tmp_path}/out"
        config = parse_options(EvaluateConfig, f"{common} {flags}".format(d=tmp_path).split())
        config.validate()
        job = build(config)
        metrics = job.evaluate()
        job.close()
        return metrics, [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]

    return run


def test_episodes_of_an_agent_are_evaluated_and_written(evaluate, tmp_path):
    """The limit on prompts is above the model's context, which the prompts are far from."""
    write_rows(tmp_path / "a" / "test.jsonl", ["1", "2", "3"])
    metrics, lines = evaluate(
        "--agent {d}/agent.py:solve --prompt_data {d}/a/test.jsonl --prompt_max_len 100000"
    )
    expected = {
        "reward": 2 / 3,
        "pass@1": 2 / 3,
        "agent/turns": 2,
        "agent/completed": 2 / 3,
        "agent/agent_error": 1 / 3,
    }
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert [line["ending"] for line in lines] == ["completed", "agent_error", "completed"]
    assert [(line["row"], line["turns"], line["passed"]) for line in lines] == [
        (0, 2, True),
        (1, 2, False),
        (2, 2, True),
    ]
    assert (lines[0]["rewards"], lines[1]["error"]) == ({"won": 1.0}, "RuntimeError: broken")
    for line in lines:
        assert [message["role"] for message in line["messages"]] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
    assert lines[0]["response"] == lines[0]["messages"][-1]["content"]
    table = [row.split() for row in evaluation_table(metrics, [line["source"] for line in lines])]
    assert [row for row in table if "_error" in row[0]] == [["agent/agent_error", "0.3333"]]


def test_an_agents_rewards_have_weights_by_their_names(evaluate, tmp_path):
    write_rows(tmp_path / "a" / "test.jsonl", ["1", "2", "3"])
    agent = "--agent {d}/agent.py:solve --prompt_data {d}/a/test.jsonl"
    metrics, _ = evaluate(f"{agent} --reward_weights won=0.75")
    assert metrics["eval_reward"] == pytest.approx(2 / 3 * 0.75)
    with pytest.raises(
        ValueError, match=r"--reward_weights names wno, but the rewards are won\. Use their names\."
    ):
        evaluate(f"{agent} --reward_weights won=0.75 wno=0.5")


CAREFUL = """
async def solve(task, session):
    turn = await session.chat(task.messages)
    return {"right": float(task["answer"] == "1"), "short": -0.001 * len(turn.text)}
"""


def test_a_named_reward_may_decide_what_passes(evaluate, tmp_path):
    """As in README's agent, whose right answers earn a little less than 1."""
    (tmp_path / "agent.py").write_text(CAREFUL)
    write_rows(tmp_path / "a" / "test.jsonl", ["1", "2", "1"])
    flags = "--agent {d}/agent.py:solve --prompt_data {d}/a/test.jsonl"
    metrics, lines = evaluate(f"{flags} --pass_on right --reward_weights right=0.5")
    assert metrics["eval_pass@1"] == pytest.approx(2 / 3)
    assert [line["passed"] for line in lines] == [True, False, True]
    with pytest.raises(
        ValueError,
        match="--pass_on names rihgt, but the rewards are right, short. Use their names.",
    ):
        evaluate(f"{flags} --pass_on rihgt")


def test_an_evaluation_that_nothing_passes_says_why(evaluate, tmp_path, caplog):
    (tmp_path / "agent.py").write_text(CAREFUL)
    write_rows(tmp_path / "a" / "test.jsonl", ["1", "2"])
    metrics, lines = evaluate("--agent {d}/agent.py:solve --prompt_data {d}/a/test.jsonl")
    assert metrics["eval_pass@1"] == 0
    largest = max(line["reward"] for line in lines)
    assert [message for message in caplog.messages if "--pass_reward" in message] == [
        f"no held-out response has passed: the largest reward is {largest:.4g}, and --pass_reward is 1. Lower it, or "
        "name the reward that decides: --pass_on right or short."
    ]


def test_an_environment_is_evaluated_without_data(evaluate):
    metrics, lines = evaluate(
        "--environment {d}/game.py:Game --eval_n_envs 3 --config {d}/seed.yaml --pass_reward 6"
    )
    assert [line["reward"] for line in lines] == [5, 6, 7]
    assert (metrics["eval_reward"], metrics["eval_reward_max"]) == (6, 7)
    assert metrics["eval_pass@1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--agent a.py:f", "No prompts are given: pass --prompt_data FILE."),
        ("--environment a.py:f", "has no rows to count: give --eval_n_envs"),
        ("--environment a.py:f --eval_n_envs 3 --n_envs 3", "give --eval_n_envs instead"),
        ("--prompt_data d.jsonl", "No reward is given"),
    ],
)
def test_what_an_evaluation_lacks_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_options(EvaluateConfig, ["--pretrain", "m", *flags.split()]).validate()
