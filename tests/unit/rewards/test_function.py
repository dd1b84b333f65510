"""What a reward function may return, on which thread it runs, and what happens when it raises."""

import asyncio
import logging
import math
import threading

import numpy as np
import pytest
import torch

from openppo.rewards import FunctionScorer, as_reward_function, start_scoring
from openppo.types import Score


@pytest.fixture
def scorer_of(make_tokenizer):
    """A scorer named as on the command line."""

    def make(function, **options):
        return FunctionScorer(as_reward_function(function, "--reward_fn f.py", ()), make_tokenizer(), **options)

    return make


def numbers(scores, name="reward"):
    """The rewards of that name, the only ones."""
    assert all(score.rewards.keys() == {name} for score in scores)
    return [score.rewards[name] for score in scores]


# One number for each sample


def test_a_function_is_not_called_without_samples(scorer_of):
    assert scorer_of(lambda *_: 1 / 0).score([]) == []


@pytest.mark.parametrize(
    "scores",
    [
        [1, 2.5],
        (1, 2.5),
        (s for s in (1, 2.5)),
        np.array([1, 2.5]),
        np.array([1, 2.5], dtype=np.float32),
        [np.float16(1), np.float64(2.5)],
        [np.int64(1), np.array(2.5)],
        [np.array([1]), np.array([[2.5]])],
        torch.tensor([1, 2.5]),
        torch.tensor([1, 2.5], requires_grad=True),
        torch.tensor([[1], [2.5]]),
        [torch.tensor(1), torch.tensor([2.5], dtype=torch.bfloat16)],
        [True, 2.5],
        {"rewards": [1, 2.5], "extra_logs": {"length": 3}},
        {"rewards": torch.tensor([1, 2.5])},
    ],
    ids=lambda scores: type(scores).__name__,
)
def test_numbers_of_python_numpy_and_torch_are_scores(scores, scorer_of, two):
    got = numbers(scorer_of(lambda *_: scores).score(two))
    assert got == [1.0, 2.5]
    assert all(type(score) is float for score in got)


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1",
        np.float32("nan"),
        torch.tensor(math.inf),
        {"a": None},
        [math.nan],
        1e39,
        10**400,
    ],
    ids=repr,
)
def test_a_score_that_is_no_finite_number_is_an_error_naming_flag_value_and_prompt(bad, scorer_of, two):
    pattern = r"^--reward_fn f\.py returned .* for prompt 'a'; a finite number is needed"
    with pytest.raises(ValueError, match=pattern):
        scorer_of(lambda *_: [1.0, bad]).score(two)


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, 2.0, 3.0], {"a": [1.0]}])
def test_a_wrong_number_of_scores_is_an_error_with_both_numbers(scores, scorer_of, two):
    with pytest.raises(ValueError, match=r"--reward_fn f\.py returned \d scores for 2 samples"):
        scorer_of(lambda *_: scores).score(two)


@pytest.mark.parametrize("result", [None, 1.0, "ab", {"a": 1.0}])
def test_a_function_that_forgets_its_list_is_an_error_naming_it(result, scorer_of, two):
    with pytest.raises(ValueError, match=r"--reward_fn f\.py returned .*; a list with one result per sample"):
        scorer_of(lambda *_: result).score(two)


# All forms


async def _async_batch(responses):
    return [len(response) for response in responses]


async def _async_single(response):
    return len(response)


@pytest.mark.parametrize(
    "function",
    [
        lambda responses: [len(response) for response in responses],
        lambda response: len(response),
        _async_batch,
        _async_single,
        lambda prompts, completions, **columns: [len(completion) for completion in completions],
    ],
    ids=["batch", "sample", "async batch", "async sample", "TRL"],
)
def test_each_form_of_a_function_gives_the_same_scores(function, scorer_of, two):
    assert numbers(scorer_of(function, name="reward_fn").score(two), "reward_fn") == [2.0, 0.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda response: {"length": len(response), "style": 0.5},
        lambda responses: [{"length": len(response), "style": 0.5} for response in responses],
        lambda responses: {"length": [len(response) for response in responses], "style": np.array([0.5, 0.5])},
    ],
    ids=["sample", "batch", "dict of lists"],
)
def test_dicts_are_named_rewards(function, scorer_of, two):
    scores = scorer_of(function).score(two)
    assert scores == [Score({"length": 2.0, "style": 0.5}), Score({"length": 0.0, "style": 0.5})]


def test_async_calls_of_samples_run_at_the_same_time_in_one_loop_for_the_whole_run(scorer_of, two):
    loops = []

    async def judge(response):
        loops.append(asyncio.get_running_loop())
        n_before = len(loops)
        while len(loops) % 2 == 1:  # until the other one is here; alone this would never end
            await asyncio.sleep(0)
        return float(n_before)

    scorer = scorer_of(judge)
    assert sorted(numbers(scorer.score(two))) == [1.0, 2.0]
    assert sorted(numbers(start_scoring(scorer, two).wait())) == [3.0, 4.0]
    assert len(set(map(id, loops))) == 1, "a client that was made in the first call still works in the second"


def test_a_function_that_runs_a_loop_of_its_own_may_do_so(scorer_of, two):
    async def judge():
        return 3.0

    assert numbers(scorer_of(lambda response: asyncio.run(judge())).score(two)) == [3.0, 3.0]


def test_the_thread_of_a_function_has_the_gpu_of_the_rank(scorer_of, two, monkeypatch):
    chosen: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.update({threading.get_ident(): gpu}))

    def reward(prompt, response):
        return chosen[threading.get_ident()]

    assert numbers(scorer_of(reward).score(two)) == [3, 3]


def test_a_function_always_runs_on_the_same_thread(scorer_of, two):
    threads = []

    def reward_fn(response):
        threads.append(threading.current_thread())
        return 0.0

    scorer = scorer_of(reward_fn)
    scorer.score(two)
    start_scoring(scorer, two).wait()
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


# Rewards of tokens and steps


@pytest.fixture
def steps(make_trajectory):
    """Response "ab cd x" in letters, with z between its steps: a b z c d z x and EOS."""
    return make_trajectory([4], [4, 5, 29, 6, 7, 29, 27, 1])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_list_as_long_as_the_response_rewards_its_tokens(kind, scorer_of, steps):
    rewards = [0.5, 0, 0, -1, 0, 0, 0, 2]
    (score,) = scorer_of(lambda response: kind(rewards)).score([steps])
    assert score == Score(token_rewards=[0.0, 0.5, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 2.0]), "the first is the prompt"


def test_a_list_with_one_number_per_step_rewards_the_last_token_of_each(scorer_of, steps):
    (score,) = scorer_of(lambda response: [1, 0, 3], step_separator="z").score([steps])
    ends = [False, False, True, False, False, True, False, True, False]  # a reward of 0 is a reward
    assert score == Score(token_rewards=[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0], step_ends=ends)


def test_rewards_of_tokens_and_steps_are_weighted(scorer_of, steps):
    scorer = scorer_of(lambda response: [1, -2, 3], step_separator="z", token_weight=0.5)
    assert scorer.score([steps])[0].token_rewards == [0.0, 0.0, 0.5, 0.0, 0.0, -1.0, 0.0, 1.5, 0.0]


def test_the_rewards_of_two_steps_in_one_token_add_up(scorer_of, make_trajectory, make_tokenizer):
    scorer = scorer_of(lambda response: [1, 2], step_separator="x")
    scorer.tokenizer.add_tokens(["axb"])
    token = scorer.tokenizer.convert_tokens_to_ids("axb")
    (score,) = scorer.score([make_trajectory([4], [token, 29, 1])])
    assert score.token_rewards == [0.0, 1.0, 2.0, 0.0], "b goes on into the next token"
    (score,) = scorer.score([make_trajectory([4], [token, 27, 1])])
    assert score.token_rewards == [0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("n", [0, 1, 2, 4, 7, 9])
def test_a_list_of_another_length_is_an_error_with_all_counts(n, scorer_of, steps):
    with pytest.raises(ValueError) as error:
        scorer_of(lambda response: [0.0] * n, step_separator="z").score([steps])
    for part in (f"returned {n} numbers for prompt 'ask'", "8 tokens and 3 steps", "--step_separator 'z'"):
        assert part in str(error.value)


# Exceptions


class Picky:
    """Raises for the prompt "a"."""

    def __init__(self):
        self.calls: list[list[str]] = []

    def batch(self, prompts):
        """For a batch."""
        self.calls.append(prompts)
        return [self.single(prompt) for prompt in prompts]

    def single(self, prompt):
        """For a sample."""
        if prompt == "a":
            raise KeyError("no such thing")
        return 7.0

    async def async_single(self, prompt):
        """For a sample, async."""
        return self.single(prompt)

    def lazily(self, prompts):
        """For a batch; raises where it is iterated over."""
        return (self.single(prompt) for prompt in prompts)


FORMS = ["batch", "single", "async_single", "lazily"]


@pytest.mark.parametrize("form", FORMS)
def test_an_exception_ends_the_run_naming_sample_and_cause(form, scorer_of, two):
    pattern = r"^--reward_fn f.py raised KeyError\('no such thing'\) for prompt 'a'\. .*--reward_error_value"
    with pytest.raises(RuntimeError, match=pattern) as error:
        scorer_of(getattr(Picky(), form)).score(two)
    assert isinstance(error.value.__cause__, KeyError)
    assert error.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("form", FORMS)
def test_an_exception_can_cost_a_chosen_value(form, scorer_of, two, caplog):
    caplog.set_level(logging.WARNING, "openppo")
    scores = scorer_of(getattr(Picky(), form), error_value=-1.5).score(two)
    assert scores == [Score({"reward": 7.0}), Score({"reward": -1.5}, failed=True)]
    (line,) = caplog.messages
    assert "raised on 1 of 2 samples, whose reward is --reward_error_value -1.5" in line
    assert "KeyError('no such thing') for prompt 'a'" in line


def test_a_batch_is_split_only_when_it_raised(scorer_of, two):
    picky = Picky()
    scorer_of(picky.batch, error_value=0.0).score(two[:1] * 2)
    assert picky.calls == [["ab", "ab"]]
    scorer_of(picky.batch, error_value=0.0).score(two)
    assert picky.calls[1:] == [["ab", "a"], ["ab"], ["a"]]


def test_an_exception_of_a_batch_that_no_sample_raises_alone_is_not_hidden(scorer_of, two):
    def reward_fn(prompts):
        if len(prompts) > 1:
            raise OverflowError("too many")
        return [1.0]

    with pytest.raises(RuntimeError, match="OverflowError.* a batch of 2 samples, but for none of them alone"):
        scorer_of(reward_fn).score(two)
    assert numbers(scorer_of(reward_fn, error_value=0.0).score(two)) == [1.0, 1.0]


def test_a_wrong_return_value_ends_the_run_even_with_an_error_value(scorer_of, two):
    with pytest.raises(ValueError, match="returned nan"):
        scorer_of(lambda response: math.nan, error_value=0.0).score(two)


def test_what_is_no_error_of_the_function_is_not_caught(scorer_of, two):
    def reward_fn(response):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        scorer_of(reward_fn, error_value=0.0).score(two)


def test_sys_exit_in_an_async_function_names_the_sample(scorer_of, two):
    async def reward_fn(response):
        raise SystemExit(0)

    with pytest.raises(RuntimeError, match="SystemExit.* for prompt 'ab'"):
        scorer_of(reward_fn, error_value=0.0).score(two)


def test_sys_exit_in_a_task_of_an_async_function_is_an_error(scorer_of, two):
    async def leave():
        raise SystemExit(0)

    async def reward_fn(response):
        task = asyncio.create_task(leave())
        await asyncio.sleep(60)
        return float(task.done())

    with pytest.raises(RuntimeError, match="SystemExit"):
        scorer_of(reward_fn).score(two[:1])


# What the function is given is its own


def spoiling_all(messages, row, label, token_ids, kinds):
    """Change whatever a sample may hold, in place."""
    messages[0]["content"] = "changed"
    messages.append({"role": "user", "content": "more"})
    row.pop("label")
    row["kinds"].append("more")
    label["answers"].clear()
    token_ids.clear()
    kinds.append("again")


def test_what_a_function_changes_in_one_sample_no_other_sees(scorer_of, make_trajectory):
    def single(response, messages, row, label, token_ids, **columns):
        spoiling_all(messages, row, label, token_ids, columns["kinds"])
        return float(len(messages))

    def batch(responses, messages, rows, labels, token_ids, **columns):
        for sample in zip(messages, rows, labels, token_ids, columns["kinds"], strict=True):
            spoiling_all(*sample)
        return [float(len(chat)) for chat in messages]

    def prompt():
        row = {"label": {"answers": [1]}, "kinds": ["a"]}
        return {"label": row["label"], "row": row, "messages": [{"role": "user", "content": "ask"}]}

    shared = prompt()
    samples = [make_trajectory([4], [5, 1], **shared) for _ in range(3)]
    for function in (single, batch):
        for _ in range(2):  # the next episode
            assert numbers(scorer_of(function).score(samples)) == [2.0, 2.0, 2.0]
    assert shared == prompt()
    assert [sample.token_ids for sample in samples] == [[4, 5, 1]] * 3
