"""The evaluate command: its table, its lines, and what it says of input that cannot work."""

import json
from pathlib import Path

import pytest

from openppo.cli.options import parse_options
from openppo.config import EvaluateConfig
from openppo.trainer.evaluation.generation import EvaluateJob, evaluation_table

REWARD = """
def reward_fn(prompts, responses, labels):
    return [{"letters": len(response), "label": label} for response, label in zip(responses, labels)]
"""


def write_rows(file: Path, labels: list[int]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"input": "abc", "answer": label}) + "\n" for label in labels))
    return file


def test_lines_and_metrics_say_what_the_reward_function_said(models, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    first, second = write_rows(tmp_path / "a" / "test.jsonl", [1, 2]), write_rows(tmp_path / "b" / "test.jsonl", [6])
    arguments = f"""--pretrain {models}/actor --prompt_data {first},{second} --label_key answer --generate_max_len 5
        --reward_fn {tmp_path}/reward.py --reward_weights letters=0 --pass_reward 2
        --output_path {tmp_path}/out.jsonl"""
    job = EvaluateJob(parse_options(EvaluateConfig, arguments.split()))
    metrics = job.evaluate()
    expected = {"eval_reward": 3, "eval/a/test.jsonl/reward": 1.5, "eval/b/test.jsonl/reward": 6}
    expected |= {"eval_pass@1": 2 / 3, "eval/a/test.jsonl/pass@1": 1 / 2, "eval/b/test.jsonl/pass@1": 1}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, (source, row, label) in zip(lines, [(first, 0, 1), (first, 1, 2), (second, 0, 6)], strict=True):
        expected = {"source": str(source), "row": row, "sample": 0, "prompt": "abc", "response": lines[0]["response"]}
        expected |= {"label": label, "reward": label, "passed": label >= 2}
        expected["rewards"] = {"letters": len(line["response"]), "label": label}
        assert line == expected | {name: line[name] for name in ("finish_reason", "n_tokens")}


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
