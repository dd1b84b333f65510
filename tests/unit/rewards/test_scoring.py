"""Several sources at the same time: who runs where, what is merged, and which errors come up."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from openppo.rewards import CombinedScorer, check_scores, start_scoring
from openppo.types import Score


@dataclass
class Source:
    """Gives the same score to every trajectory, and remembers on which thread."""

    given: Score
    collective: bool = False
    name: str = "a source"
    before: Callable = int
    thread: threading.Thread | None = None

    def __str__(self):
        return self.name

    def score(self, trajectories):
        self.thread = threading.current_thread()
        self.before()
        return [self.given] * len(trajectories)


GOOD = Score({"good": 1.0})


def test_only_a_collective_source_scores_on_the_callers_thread(two):
    computed = threading.Event()
    source = Source(GOOD, before=lambda: computed.wait(60))
    wait_for = start_scoring(source, two)
    computed.set()  # the caller's own work; were the source not in the background, this would never be reached
    assert wait_for() == [GOOD, GOOD]
    assert source.thread is not threading.current_thread()
    collective = Source(GOOD, collective=True)
    wait_for = start_scoring(collective, two)
    assert collective.thread is threading.current_thread()
    assert wait_for() == [GOOD, GOOD]


@pytest.mark.parametrize("collective", [True, False])
def test_sources_run_at_the_same_time(collective, two):
    """The collective one after the others have started, or each would wait for the other for ever."""
    both_are_here = threading.Barrier(2, timeout=60)
    sources = [Source(Score({name: 1.0}), before=both_are_here.wait) for name in "ab"]
    sources[0].collective = collective
    combined = CombinedScorer(sources)
    assert combined.collective == collective
    assert combined.score(two) == [Score({"a": 1.0, "b": 1.0})] * 2
    assert (sources[0].thread is threading.current_thread()) == collective


@pytest.mark.parametrize("collective", [True, False])
def test_what_a_source_raises_comes_up(collective, two):
    source = Source(GOOD, collective, before=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start_scoring(source, two)()
    with pytest.raises(ZeroDivisionError):
        CombinedScorer([Source(GOOD), source]).score(two)


def test_token_rewards_of_several_sources_are_summed(two):
    sources = [
        Source(Score(token_rewards=[0.5, -1.0, 0.0], step_ends=[True, True, False])),
        Source(Score({"a": 1.0}, failed=True)),
        Source(Score(token_rewards=[1.0, 0.0, 0.0], step_ends=[True, False, False]), collective=True),
    ]
    expected = Score({"a": 1.0}, [1.5, -1.0, 0.0], [True, True, False], failed=True)
    assert CombinedScorer(sources).score(two[:1]) == [expected]
    of_each_token = Source(Score(token_rewards=[0.0, 0.0, 0.0]))
    (score,) = CombinedScorer([*sources, of_each_token]).score(two[:1])
    assert score.step_ends == [True, True, True]


def test_two_sources_of_one_name_are_an_error_naming_them(two):
    combined = CombinedScorer([Source(GOOD, name="--reward_fn f.py"), Source(GOOD, name="--remote_rm_url")])
    with pytest.raises(
        ValueError, match="^--reward_fn f.py and --remote_rm_url: two of them give a reward named 'good'"
    ):
        combined.score(two)


def test_a_bad_score_is_named_with_source_shortened_prompt_and_row(make_trajectory):
    sample = make_trajectory([4], [1], text="x" * 10_000, source="data/a.jsonl", index=6)
    with pytest.raises(ValueError, match="^a source returned nan for prompt 'xxx") as error:
        check_scores([math.nan], [sample], "a source")
    assert len(str(error.value)) < 350
    assert "(row 7 of data/a.jsonl); a finite number" in str(error.value)
