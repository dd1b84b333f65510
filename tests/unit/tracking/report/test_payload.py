"""Data of the page: curves thinned out honestly, samples within a bound, each joined to its own tokens."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from openppo.tracking.report import page as page_module
from openppo.tracking.report.catalog import charts_of
from openppo.tracking.report.page import as_json, curves, evenly, json_size, payload, render, sample_rows
from openppo.tracking.report.run_data import LogLine, RunData, read_run, short_names

MakeRun = Callable[..., Path]


def line(step: int, size: int, evaluation: bool = False, number: int = 0) -> LogLine:
    text = json.dumps({"step": step, "evaluation": evaluation, "sample": number, "texts": ["a"], "fill": ""})
    return LogLine((step, evaluation), text.replace('"fill": ""', f'"fill": "{"x" * (size - len(text))}"'))


def test_every_beginning_of_evenly_is_spread_evenly() -> None:
    assert list(evenly(range(9))) == [8, 0, 4, 2, 6, 1, 3, 5, 7]
    for n in range(10, 20):
        for taken in range(2, n):
            chosen = sorted(list(evenly(range(n)))[:taken])
            assert max(b - a for a, b in itertools.pairwise(chosen)) <= 2 * (n - 1) / (taken - 1) + 1


def test_a_curve_has_a_point_for_each_report_or_the_mean_of_several() -> None:
    rows = [
        {"step": s, "time": 3600.0 * s, "a": s / 7, "ratio_max": s % 3, "b": None, "eval_b": 1.0} for s in range(10)
    ]
    made = curves(rows[1:6], 100, evaluation=False)
    assert (made["every"], made["steps"], made["hours"]) == (1, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    assert made["values"]["a"] == [0.14286, 0.28571, 0.42857, 0.57143, 0.71429]
    made = curves(rows, 4, evaluation=False)
    assert (made["every"], made["steps"]) == (3, [2, 5, 8, 9])
    of_maximum = {"ratio_max": [2, 2, 2, 0], "b": [None] * 4}
    assert made["values"] == {"a": [0.14286, 0.57143, 1.0, 1.2857], **of_maximum}


def test_evaluations_are_a_table_of_their_own_over_the_same_hours() -> None:
    rows = [
        {"step": s, "time": 7200.0 + 3600 * s}
        | ({"a": s / 10} if s > 0 else {})
        | ({"eval_b": 0.5} if s % 2 == 0 else {})
        for s in (0, 1, 2, 4)
    ]
    made = payload([RunData(Path("run"), rows)])["runs"][0]
    assert (made["curves"]["steps"], made["curves"]["hours"]) == ([1, 2, 4], [1, 2, 4])
    assert made["curves"]["values"] == {"a": [0.1, 0.2, 0.4]}
    assert (made["evaluations"]["steps"], made["evaluations"]["hours"]) == ([0, 2, 4], [0, 2, 4])
    assert made["evaluations"]["values"] == {"eval_b": [0.5, 0.5, 0.5]}


def test_samples_get_their_own_tokens() -> None:
    keys = [(step, evaluation, number) for step in (1, 2) for evaluation in (True, False) for number in (0, 1)]
    samples = [line(step, 100, evaluation, number) for step, evaluation, number in keys]
    tokens = [
        LogLine((step, evaluation), line(step, 100, evaluation, n).text.replace('"a"', f'"{step}{evaluation}{n}"'))
        for step, evaluation, n in reversed(keys)
    ]
    rows, n_steps, n_all = sample_rows(samples, tokens, 10**6)
    assert (n_steps, n_all) == (2, 2)
    found = [row["tokens"]["texts"] for row in rows]
    assert found == [[f"{step}{evaluation}{number}"] for step, evaluation, number in keys]
    of_ten = [line(s, 80) for s in range(10)]
    rows, n_steps, n_all = sample_rows(of_ten, [line(3, 80), line(6, 80)], 10**6)
    assert ([row["step"] for row in rows], n_steps, n_all) == ([3, 6], 2, 10), "only steps with tokens, where there are"
    rows, n_steps, n_all = sample_rows(of_ten, [], 10**6)
    assert (len(rows), n_steps, n_all) == (10, 10, 10)


def test_too_many_samples_are_thinned_out_evenly_and_evaluations_keep_half_of_the_room() -> None:
    training = [line(s, 1000) for s in range(100)]
    evaluations = [line(s, 1000, evaluation=True) for s in range(0, 100, 2)]
    rows, n_steps, n_all = sample_rows([*training, *evaluations], [], 20_000)
    of_training = [row["step"] for row in rows if not row["evaluation"]]
    of_evaluations = [row["step"] for row in rows if row["evaluation"]]
    assert (len(of_training), len(of_evaluations)) == (10, 10)
    assert {0, 99} <= set(of_training)
    assert {0, 98} <= set(of_evaluations)
    assert max(b - a for a, b in itertools.pairwise(of_training)) <= 26
    assert n_steps < n_all == 100


@pytest.mark.parametrize("text", ["<b>&amp;</b>", "\u00e9\u0416", "\U0001f600", "plain"])
@pytest.mark.parametrize("n_metrics", [10, 1000])
def test_a_page_stays_below_5_mb_whatever_is_written_and_however_much_is_measured(
    make_run: MakeRun, text: str, n_metrics: int
) -> None:
    row = dict.fromkeys([f"metric_{i}" for i in range(n_metrics)], -0.00123456)
    keys = [{"step": s, "sample": n} for s in range(300) for n in range(8)]
    samples = [{**key, "prompt": "p", "response": text * 300, "reward": 1.0} for key in keys]
    tokens = [{**key, "texts": [text] * 10, "kl": [-0.123456] * 300} for key in keys]
    run = read_run(make_run("a", [{"step": s, "time": 1.0, **row} for s in range(300)], samples, tokens))
    for runs in ([run], [run, run]):
        assert 1_000_000 < len(render(runs).encode()) < 5_000_000
    for ascii in (True, False):
        written = json.dumps({"a": text, "b": [1, 2.5]}, separators=(",", ":"), ensure_ascii=ascii)
        assert json_size(written) == len(as_json({"a": text, "b": [1, 2.5]}))


def test_json_ends_no_script_and_has_no_number_that_json_has_not() -> None:
    content = {
        "a": "</script><script>alert(1)</script><!--",
        "b": [float("inf"), float("nan"), 1.5],
        "c": "\u2028\ud83d",
    }
    text = as_json(content)
    assert text.isascii()
    assert not set("<>&") & set(text)
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["a"] == content["a"]
    assert read["b"] == ["Infinity", "NaN", 1.5]
    assert read["c"] == "\u2028\ud83d"


def test_each_metric_is_in_one_chart_and_unknown_ones_get_their_own() -> None:
    names = ["reward", "eval_reward", "reward/style", "time/step_s", "time", "step", "mine/own", "kl", "kl_k3"]
    charts = charts_of(names)
    shown = [metric for chart in charts for metric in chart["metrics"]]  # type: ignore[attr-defined]
    assert sorted(shown) == sorted(set(names) - {"time", "step"})
    by_title = {chart["title"]: chart for chart in charts}
    assert by_title["KL from the reference"]["metrics"] == ["kl", "kl_k3"]
    assert by_title["KL from the reference"]["target"] == "kl_target"
    assert by_title["mine/own"]["group"] == "Other"
    assert "Value loss" not in by_title, "a run without a critic"


def test_a_run_is_read_from_its_folder_or_its_logs_and_lines_that_are_no_json_are_counted(make_run: MakeRun) -> None:
    folder = make_run("run", [{"step": 1, "reward": 0.5}], [{"step": 1, "prompt": "p"}], config={"seed": 3})
    with (folder / "logs" / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"step": 2, "reward": 0.75}\n{"step": 3, "rew')
    for place in (folder, folder / "logs"):
        run = read_run(place)
        assert run.folder == folder
        assert [row["reward"] for row in run.metrics] == [0.5, 0.75]
        assert run.unreadable == 2
        assert run.config == {"seed": 3}
        assert [x.key for x in run.samples] == [(1, False)]
        assert run.tokens == []
        assert run.environment == {}


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    assert short_names([tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"]) == ["a/ppo", "b/ppo"]
    assert short_names([tmp_path / "a" / "ppo", tmp_path / "a" / "grpo"]) == ["ppo", "grpo"]
    assert len(set(short_names([tmp_path, tmp_path]))) == 2


def test_metrics_are_shared_out_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_POINTS", 300)
    rows = [{"step": s, "a": 1.0} for s in range(1000)]
    made = payload([RunData(Path(name), rows) for name in ("x", "y", "z")])
    assert [len(run["curves"]["steps"]) for run in made["runs"]] == [100, 100, 100]
