"""Reward functions of files in processes of their own: the same scores, with an end to each sample."""

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from openppo.rewards import FunctionScorer, RewardFunction
from openppo.rewards.function_process import FunctionProcess, RaisedThere, _with_own_gpu
from openppo.types import Score
from openppo.user_code import load_callable, split_location

SOURCE = """
import asyncio, functools, os, pathlib, subprocess, sys, time
HERE = pathlib.Path(__file__).parent
with open(HERE / "loaded", "a") as file:
    file.write(f"{os.getpid()}\\n")
def note(response):
    print("printed", sys.stdin.read() or "no input")
    return {"reward": len(response), "extra": {"pid": os.getpid()}}
def together(label):
    (HERE / f"here{label}").touch()
    while not all((HERE / f"here{i}").exists() for i in range(2)):  # alone this would never end
        time.sleep(0.01)
    return label
def slow(label):
    if label == 1:
        child = subprocess.Popen(["sleep", "1000"])
        (HERE / "child").write_text(str(child.pid))
        time.sleep(1000)
    return label
def left(label):
    return os._exit(3) if label == 1 else label
def raises(label):
    return {0: 0.0, 2: 2.0, 3: 3.0}[label]
def odd(label):
    return (lambda: 0) if label == 1 else label
def lists(labels):
    return (label for label in labels) if 1 not in labels else time.sleep(1000)
async def later(label):
    return label
class Judge:
    def __call__(self, label):
        return label
judge, part = Judge(), functools.partial(raises)
"""


def until(condition):
    """What it returns once that is true; an error after half a minute."""
    deadline = time.monotonic() + 30
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def has_ended(pid):
    """Whether a process is gone, or only waits for somebody to read its status."""
    stat = Path("/proc") / pid / "stat"
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE)
    return tmp_path / "f.py"


@pytest.fixture
def scorer_of(file, make_tokenizer):
    """A scorer of a function of the file, in so many processes."""

    def make(name, n=1, seconds=None, **options):
        location = f"{file}:{name}"
        function = RewardFunction(load_callable(location, "--reward_fn"), "--reward_fn f.py", ())
        function.start_processes(*split_location(location, "--reward_fn"), n, seconds)
        return FunctionScorer(function, make_tokenizer(), **options)

    return make


@pytest.fixture
def labelled(make_sample):
    """Samples with labels 0, 1, 2, 3."""
    return [make_sample([4], [5, 1], text=f"ask {i}", label=i) for i in range(4)]


def test_a_process_loads_the_file_once_and_its_prints_are_no_answers(file, scorer_of, two, capfd):
    scorer = scorer_of("note")
    scores = [score for _ in range(3) for score in scorer.score(two)]
    here, there = file.with_name("loaded").read_text().split()
    assert [score.rewards for score in scores] == [{"reward": 2.0}, {"reward": 0.0}] * 3
    assert {score.extras["pid"] for score in scores} == {float(there)}
    assert int(here) == os.getpid() != int(there)
    assert capfd.readouterr().err.count("printed no input") == 6


def test_a_process_imports_modules_beside_the_file(file, scorer_of, labelled, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file.with_name("doubles_in_a_process.py").write_text("def double(x):\n    return 2 * x\n")
    file.write_text(
        "from doubles_in_a_process import double\ndef late(label):\n    return double(label)\n"
    )
    scores = scorer_of("late", n=2).score(labelled)
    assert [score.rewards["reward"] for score in scores] == [0, 2, 4, 6]


def test_as_many_samples_as_processes_are_scored_at_a_time(file, scorer_of, labelled):
    assert scorer_of("together", n=2).score(labelled[:2]) == [
        Score({"reward": 0.0}),
        Score({"reward": 1.0}),
    ]
    assert len(file.with_name("loaded").read_text().split()) == 1 + 2


ENDS = {
    "slow": r"TimeoutError\('no result within --reward_timeout 2 s a sample'\)",
    "left": r"ChildProcessError\('its process ended with status 3'\)",
    "raises": r"KeyError\(1\)",
    "odd": r".*pickle.*",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_sample_without_result_ends_the_run_or_costs_a_chosen_value(
    name, file, scorer_of, labelled, caplog
):
    pattern = rf"^--reward_fn f.py raised {ENDS[name]} for prompt 'ask 1'\. With --reward_error_value such samples"
    with pytest.raises(RuntimeError, match=pattern):
        scorer_of(name, seconds=2.0).score(labelled)
    caplog.set_level(logging.WARNING, "openppo")
    scores = scorer_of(name, n=2, seconds=2.0, error_value=-1.5).score(labelled)
    expected = [Score({"reward": float(i)}) for i in range(4)]
    assert re.fullmatch(rf"{ENDS[name]} for prompt 'ask 1'", scores[1].error)
    lost = Score({"reward": -1.5}, failed=True, error=scores[1].error)
    assert scores == [expected[0], lost, *expected[2:]], "others are scored"
    assert "raised on 1 of 4 samples" in caplog.text


def test_a_limit_may_exceed_what_the_system_can_wait(scorer_of, labelled):
    scorer = scorer_of("raises", seconds=1e9)
    assert scorer.score(labelled[:1]) == [Score({"reward": 0.0})]


def test_what_a_late_sample_has_started_ends_with_it(file, scorer_of, labelled):
    scorer_of("slow", seconds=1.0, error_value=0.0).score(labelled[1:2])
    until(lambda: has_ended(file.with_name("child").read_text()))


def test_an_exception_shows_where_the_file_raised_it(scorer_of, labelled):
    with pytest.raises(RuntimeError) as error:
        scorer_of("raises").score(labelled[1:2])
    cause = error.value.__cause__
    assert isinstance(cause, RaisedThere)
    assert 'f.py", line' in cause.__notes__[0] and "in raises" in cause.__notes__[0]


def test_a_batch_is_one_call_with_the_time_of_all_its_samples(
    scorer_of, labelled, caplog, monkeypatch
):
    asked, call = [], FunctionProcess.call

    def record(self, arguments, seconds):
        asked.append((arguments["labels"], seconds))
        return call(self, arguments, seconds)

    monkeypatch.setattr(FunctionProcess, "call", record)
    caplog.set_level(logging.INFO, "openppo")
    scores = scorer_of("lists", n=2, seconds=1.0, error_value=7.0).score(labelled)
    assert [score.rewards["reward"] for score in scores] == [0.0, 7.0, 2.0, 3.0]
    assert asked[0] == ([0, 1, 2, 3], 4.0)
    assert sorted(asked[1:]) == [([i], 1.0) for i in range(4)], "after the batch each sample alone"
    assert "--reward_fn f.py scores whole batches, each in one of --reward_workers 2" in caplog.text


def test_a_process_sees_the_gpu_of_its_rank_alone(monkeypatch):
    for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for visible, expected in (("", "2"), ("7,5,3,1", "3")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _with_own_gpu()["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("name", "kind"), [("later", "async"), ("judge", "an object"), ("part", "an object")]
)
def test_async_functions_and_objects_stay_in_the_process(
    name, kind, file, scorer_of, labelled, caplog
):
    scorer = scorer_of(name, n=2)
    assert scorer.function.n_processes == 0
    assert (
        f"--reward_fn f.py is {kind}" in caplog.text and "it stays in this process" in caplog.text
    )
    assert scorer.score(labelled[2:3]) == [Score({"reward": 2.0})]
    assert file.with_name("loaded").read_text().split() == [str(os.getpid())]


def test_a_function_ends_with_its_run(file):
    """Though it would never return, and the run was killed."""
    path = os.pathsep.join(sys.path)
    program = f"""
from pathlib import Path
from openppo.rewards.function_process import FunctionProcess
FunctionProcess("--reward_fn", Path({str(file)!r}), "slow").call({{"label": 1}})
"""
    run = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path})
    child = until(lambda: file.with_name("child").exists() and file.with_name("child").read_text())
    run.kill()
    run.wait()
    [pid] = file.with_name("loaded").read_text().split()
    until(lambda: has_ended(pid) and has_ended(child))
