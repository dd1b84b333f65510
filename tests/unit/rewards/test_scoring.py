"""Several sources at the same time: who runs where, what is merged; and where the steps of a response end."""

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from openppo.rewards import (
    CombinedScorer,
    FunctionScorer,
    RewardFunction,
    check_scores,
    start_scoring,
    step_ends,
)
from openppo.rewards.function_values import values_of
from openppo.rewards.model import RewardModelText, policy_tokens
from openppo.rewards.response_text import response_text
from openppo.rewards.scoring import answer_length, step_tokens
from openppo.types import Score
from tests.conftest import save_tokenizer


@dataclass
class Source:
    """Gives the same score to every sample, and remembers on which thread."""

    given: Score
    collective: bool = False
    name: str = "a source"
    before: Callable = int
    thread: threading.Thread | None = None

    def __str__(self):
        return self.name

    def score(self, samples):
        self.thread = threading.current_thread()
        self.before()
        return [self.given] * len(samples)


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
        Source(Score({"a": 1.0}, failed=True, extras={"n": 2.0}, notes={"t": "x"})),
        Source(
            Score(token_rewards=[1.0, 0.0, 0.0], step_ends=[True, False, False]), collective=True
        ),
    ]
    logged = {"extras": {"n": 2.0}, "notes": {"t": "x"}}
    expected = Score({"a": 1.0}, [1.5, -1.0, 0.0], [True, True, False], failed=True, **logged)
    assert CombinedScorer(sources).score(two[:1]) == [expected]
    of_each_token = Source(Score(token_rewards=[0.0, 0.0, 0.0]))
    (score,) = CombinedScorer([*sources, of_each_token]).score(two[:1])
    assert score.step_ends == [True, True, True]


def test_two_sources_of_one_name_are_an_error_naming_them(two):
    combined = CombinedScorer(
        [Source(GOOD, name="--reward_fn f.py"), Source(GOOD, name="--remote_rm_url")]
    )
    says = "^--reward_fn f.py and --remote_rm_url: two of them give a reward named 'good'"
    extras = CombinedScorer([Source(Score({name: 1.0}, extras={"n": 1.0})) for name in "ab"])
    with pytest.raises(
        ValueError, match="two of them give an extra named 'n'; give one another name"
    ):
        extras.score(two)
    with pytest.raises(ValueError, match=says):
        combined.score(two)


def test_a_bad_score_is_named_with_source_shortened_prompt_and_row(make_sample):
    sample = make_sample([4], [1], text="x" * 10_000, source="data/a.jsonl", index=6)
    with pytest.raises(ValueError, match="^a source returned nan for prompt 'xxx") as error:
        check_scores([math.nan], [sample], "a source")
    assert len(str(error.value)) < 350
    assert "(row 7 of data/a.jsonl); a finite number" in str(error.value)


def rewards_of_tokens(sample, tokenizer):
    """As a function gives them, one for each action of ``game``."""
    function = RewardFunction(lambda response: [1, 2, 3, 4, 5, 6], "f", ())
    return FunctionScorer(function, tokenizer).score([sample])


READERS = {
    "functions": values_of,
    "rewards of tokens": rewards_of_tokens,
    "steps": lambda sample, tokenizer: step_tokens(sample, tokenizer, "z"),
    "lengths": lambda sample, _: answer_length(sample),
    "texts": response_text,
    "tokens": lambda sample, tokenizer: policy_tokens(tokenizer, sample),
    "own tokens": lambda sample, tokenizer: RewardModelText(tokenizer, tokenizer, "m")(sample),
}


@pytest.mark.parametrize("reader", READERS)
def test_rewards_read_the_last_segment(reader, game, cut_game, make_tokenizer):
    read = READERS[reader]
    tokenizer = make_tokenizer()
    assert read(cut_game, tokenizer) == read(game, tokenizer)


TEXT = "Add two.\n\nThen ✓🙂 halve.\n\nDone."


ENDS = {
    "ab": [1],
    "abXcdXe": [1, 4, 6],
    "XabXXcd": [2, 6],
    "abX": [1],
    "X": [],
    "": [],
    "XXX": [],
    "ab cd ": [4],
}


@pytest.mark.parametrize(("text", "ends"), ENDS.items())
def test_blank_steps_and_blanks_at_the_end_do_not_count(text, ends, tmp_path):
    tokenizer = save_tokenizer(tmp_path, "abcdeX ")
    assert (
        step_ends([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], tokenizer, "X") == ends
    )


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-v3", "phi3-mini", "gpt2"])
def test_places_are_those_of_a_search_from_the_left_for_any_tokens(name, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    ids = [*tokenizer(TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    starts = [0, *(end + 1 for end in step_ends(ids, tokenizer, "\n\n"))]
    texts = [tokenizer.decode(ids[start:stop]).strip() for start, stop in pairwise(starts)]
    assert texts == ["Add two.", "Then ✓🙂 halve.", "Done."]
    rng = random.Random(0)
    pieces = ["a", " the", "\n", "\n\n", "😀", "é", " ", "Step 1.", "中文", "-"]
    for separator in ("\n\n", "\n", "a") * 20:
        text = "".join(rng.choices(pieces, k=rng.randint(1, 30)))
        for ids in (tokenizer(text)["input_ids"], rng.choices(range(len(tokenizer)), k=20)):
            whole = tokenizer.decode(ids)
            expected, start = [], 0
            for step in whole.split(separator):
                until_here = whole[: start + len(step.rstrip())]
                if step.strip():
                    prefixes = (tokenizer.decode(ids[:n]) for n in range(len(ids) + 1))
                    expected.append(
                        next(n for n, p in enumerate(prefixes) if p.startswith(until_here)) - 1
                    )
                start += len(step) + len(separator)
            assert step_ends(ids, tokenizer, separator) == expected
