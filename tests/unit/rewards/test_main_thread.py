"""Reward functions that work on the main thread alone: the error names where there is one."""

import pytest

from openppo.rewards import FunctionScorer, RewardFunction
from openppo.types import Score
from openppo.user_code import load_callable, split_location

SOURCE = """
import asyncio, signal, sqlite3
table = sqlite3.connect(":memory:")
def limited(label):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(5)
    signal.alarm(0)
    return label
def verified(label):
    try:
        return limited(label)
    except ValueError as error:
        raise ValueError("it uses signal.alarm() and supports no threads") from error
def read(label):
    return table.execute("select ?", [label]).fetchone()[0]
def awaited(label):
    async def later():
        return label
    return asyncio.get_event_loop().run_until_complete(later())
def threaded(label):
    raise ValueError("no such answer")
"""
FUNCTIONS = ["limited", "verified", "read", "awaited"]


@pytest.fixture
def scorer_of(tmp_path, make_tokenizer):
    """A scorer of a function of the file, on a thread or in so many processes."""
    (tmp_path / "f.py").write_text(SOURCE)

    def make(name, n=0, **options):
        location = f"{tmp_path}/f.py:{name}"
        function = RewardFunction(load_callable(location, "--reward_fn"), "--reward_fn f.py", ())
        if n > 0:
            function.start_processes(*split_location(location, "--reward_fn"), n, None)
        return FunctionScorer(function, make_tokenizer(), **options)

    return make


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_needs_the_main_thread_names_the_remedy(
    name, scorer_of, make_sample, caplog
):
    sample = make_sample([4], [5, 1], label=3)
    with pytest.raises(
        RuntimeError, match=r"for prompt 'ask'\. It needs the main thread: use --reward_workers 1"
    ):
        scorer_of(name).score([sample])
    (score,) = scorer_of(name, error_value=0.0).score([sample])
    assert (
        score.failed
        and "use --reward_workers 1" in score.error
        and "use --reward_workers 1" in caplog.text
    )
    assert scorer_of(name, n=1).score([sample]) == [Score({"reward": 3.0})]


def test_other_errors_name_no_workers(scorer_of, make_sample):
    with pytest.raises(RuntimeError, match="no such answer.*With --reward_error_value") as error:
        scorer_of("threaded").score([make_sample([4], [5, 1], label=3)])
    assert "--reward_workers" not in str(error.value)
