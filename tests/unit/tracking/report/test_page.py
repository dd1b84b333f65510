"""The page is one file that asks nobody for anything, whatever was sampled, with curves and samples within a bound."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from openppo.tracking.report import page as page_module
from openppo.tracking.report.catalog import charts_of
from openppo.tracking.report.page import as_json, curves, payload, render, sample_rows, write_report
from openppo.tracking.report.run_data import LogLine, RunData, read_run
from tests.unit.tracking.report.runs import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- <!--DATA--> ]]> \x00\x1b[31m\u202e \ud83d"


class Elements(HTMLParser):
    """Tags of a page with their attributes, as a browser reads them."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def between(start, end, page):
    return page.split(start, 1)[1].split(end, 1)[0]


def data_of(page):
    return json.loads(between('id="data">', "</script>", page))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run of one report."""
    return render([read_run(write_run(tmp_path_factory.mktemp("clean") / "run"))])


def test_sampled_text_stays_text(page, tmp_path):
    first = {"step": 1, "time": 0.0, "sample": 0}
    texts = {"texts": [HOSTILE], "ids": [1], "trained": [1], "value": [1.0]}
    text = {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "label": HOSTILE,
        "finish_reason": "eos",
        "rewards": {HOSTILE: 1.0},
    }
    options = {"prompt_data": re.sub("[\x00\x1b\ud83d]", "", HOSTILE)}
    rows = (
        [{**first, "reward": 1.0, HOSTILE: 2.0}],
        [{**first, "reward": 1.0, **text}],
        [{**first, **texts}],
    )
    dirty = render([read_run(write_run(tmp_path / "hostile", *rows, options))])
    tags, clean_tags = ([tag for tag, _ in Elements(text).found] for text in (dirty, page))
    assert tags == clean_tags, "the same elements, whatever the data"
    (run,) = data_of(dirty)["runs"]
    (sample,) = run["samples"]
    assert sample["response"] == sample["tokens"]["texts"][0] == HOSTILE
    assert "alert(1)" not in dirty.replace(between('id="data">', "</script>", dirty), "")


def test_the_page_allows_its_own_script_and_style_and_names_no_other_file(page):
    elements = Elements(page).found
    (policy,) = [
        a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("script", "style"):
        digest = hashlib.sha256(between(f"<{kind}>", f"</{kind}>", page).encode()).digest()
        assert rules[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in elements}
    assert not [a for _, a in elements if "src" in a]
    assert [a["href"] for _, a in elements if "href" in a] == ["#curves"]
    addresses = set(re.findall(r"https?://[^\s\"')]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, (
        "the name of a language, which nobody fetches"
    )
    for call in (
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert call not in page


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    run, output = write_run(tmp_path / "run"), tmp_path / "new" / "page.html"
    before = write_report([run], output).read_text()
    monkeypatch.setattr(
        Path, "write_text", lambda self, text, **options: self.open("w").write(text[:100]) / 0
    )
    with pytest.raises(ZeroDivisionError):
        write_report([run], output)
    assert output.read_text() == before


def test_a_curve_has_a_point_for_each_report_or_the_mean_of_several(monkeypatch):
    of_all = [
        {"b": None, "eval_b": 1.0, "ratio_max": s % 3, "a_min": (s + 1) % 3} for s in range(10)
    ]
    rows = [{"step": s, "time": 3600.0 * s, "a": s / 7, **of_all[s]} for s in range(10)]
    made = curves(rows[1:6], 100, evaluation=False)
    assert (made["every"], made["steps"], made["hours"]) == (1, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    assert made["values"]["a"] == [0.14286, 0.28571, 0.42857, 0.57143, 0.71429]
    made = curves(rows, 4, evaluation=False)
    assert (made["every"], made["steps"]) == (3, [2, 5, 8, 9])
    of_extremes = {"ratio_max": [2, 2, 2, 0], "a_min": [0, 0, 0, 1], "b": [None] * 4}
    assert made["values"] == {"a": [0.14286, 0.57143, 1.0, 1.2857], **of_extremes}
    made = curves(
        [{"step": 3, "eval_b": 0.5}, {"step": 4, "a": 1.0}, {"step": 6, "eval_b": 1.0}],
        9,
        evaluation=True,
    )
    assert made == {
        "every": 1,
        "steps": [3, 6],
        "hours": [None, None],
        "values": {"eval_b": [0.5, 1.0]},
    }
    monkeypatch.setattr(page_module, "MAX_POINTS", 300)  # which runs share
    made = payload(
        [
            RunData(Path(name), [{"step": s, "a": 1.0} for s in range(1000)])
            for name in ("x", "y", "z")
        ]
    )
    assert [len(run["curves"]["steps"]) for run in made["runs"]] == [100, 100, 100]


def line(step, size, evaluation=False, number=0, text="a"):
    text = json.dumps(
        {"step": step, "evaluation": evaluation, "sample": number, "texts": [text], "fill": ""}
    )
    return LogLine(
        (step, evaluation), text.replace('"fill": ""', f'"fill": "{"x" * (size - len(text))}"')
    )


def test_samples_get_their_own_tokens():
    keys = [
        (step, evaluation, number)
        for step in (1, 2)
        for evaluation in (True, False)
        for number in (0, 1)
    ]
    samples = [line(step, 100, evaluation, number) for step, evaluation, number in keys]
    tokens = [
        line(step, 100, evaluation, n, f"{step}{evaluation}{n}")
        for step, evaluation, n in reversed(keys)
    ]
    rows, *counts = sample_rows(samples, tokens, 10**6)
    assert [row["tokens"]["texts"] for row in rows] == [
        [f"{step}{evaluation}{n}"] for step, evaluation, n in keys
    ]
    assert counts == [2, 2]
    of_ten = [line(s, 80) for s in range(10)]
    for of_tokens, steps in (([line(3, 80), line(6, 80)], [3, 6]), ([], list(range(10)))):
        rows, *counts = sample_rows(of_ten, of_tokens, 10**6)
        assert [row["step"] for row in rows] == steps, "only steps with tokens, where there are any"
        assert counts == [len(steps), 10]


def test_too_many_samples_are_thinned_out_evenly_and_evaluations_keep_half_of_the_room():
    training, evaluations = (
        [line(s, 1000) for s in range(100)],
        [line(s, 1000, True) for s in range(0, 100, 2)],
    )
    for fit, of_evaluations, of_training in (
        (20, range(8, 100, 10), range(9, 100, 10)),
        (1, [], [99]),
        (0.5, [], []),
    ):
        rows, *counts = sample_rows(
            [*training, *evaluations], [], int(fit * len(as_json(training[0].text)))
        )
        assert [row["step"] for row in rows if row["evaluation"]] == [*of_evaluations]
        assert [row["step"] for row in rows if not row["evaluation"]] == [*of_training]
        assert counts == [len({*of_evaluations, *of_training}), 100]


@pytest.mark.parametrize(
    ("text", "n_metrics"),
    [("<b>&amp;</b>", 10), ("\u00e9\u0416", 1000), ("\U0001f600", 10), ("plain", 1000)],
)
def test_a_page_stays_below_5_mb_whatever_is_written_and_however_much_is_measured(
    tmp_path, text, n_metrics
):
    row = dict.fromkeys([f"metric_{i}" for i in range(n_metrics)], -0.00123456)
    keys = [{"step": s, "sample": n} for s in range(300) for n in range(8)]
    samples = [{**key, "prompt": "p", "response": text * 300, "reward": 1.0} for key in keys]
    tokens = [{**key, "texts": [text] * 10, "kl": [-0.123456] * 300} for key in keys]
    run = read_run(
        write_run(
            tmp_path / "a", [{"step": s, "time": 1.0, **row} for s in range(300)], samples, tokens
        )
    )
    for runs in ([run], [run, run]):
        assert 1_000_000 < len(render(runs).encode()) < 5_000_000


def test_json_ends_no_script_and_has_no_number_that_json_has_not():
    written = "</script><script>alert(1)</script><!--\u2028\ud83d"
    text = as_json({"a": written, "b": [float("inf"), float("nan"), 1.5]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": written,
        "b": ["Infinity", "NaN", 1.5],
    }


def test_each_metric_is_in_one_chart_and_unknown_ones_get_their_own():
    names = [
        "reward",
        "eval_reward",
        "reward/style",
        "time/step_s",
        "time",
        "step",
        "mine/own",
        "kl",
        "kl_k3",
    ]
    charts = charts_of(names)
    assert sorted(metric for chart in charts for metric in chart["metrics"]) == sorted(
        {*names} - {"time", "step"}
    )
    by_title = {chart["title"]: chart for chart in charts}
    kl = by_title["KL from the reference"]
    assert (kl["metrics"], kl["target"]) == (["kl", "kl_k3"], "kl_target")
    assert by_title["mine/own"]["group"] == "Other"
    assert "Value loss" not in by_title, "a run without a critic"


def test_a_run_is_read_from_its_folder_or_its_logs_and_lines_that_are_no_json_are_counted(tmp_path):
    folder = write_run(
        tmp_path / "run",
        [{"step": 1, "reward": 0.5}],
        [{"step": 1, "prompt": "p"}],
        config={"seed": 3},
    )
    with (folder / "logs" / "metrics.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"step": 2, "reward": 0.75}\n{"step": 3, "rew')
    for place in (folder, folder / "logs"):
        run = read_run(place)
        assert (run.folder, run.unreadable, run.config) == (folder, 2, {"seed": 3})
        assert [row["reward"] for row in run.metrics] == [0.5, 0.75]
        assert ([x.key for x in run.samples], run.tokens, run.environment) == ([(1, False)], [], {})
