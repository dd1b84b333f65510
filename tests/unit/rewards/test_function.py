"""Reward functions of users: where they are found, what they get and return, and what happens when they raise."""

import asyncio
import copy
import dataclasses
import functools
import logging
import math
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from openppo.rewards import FunctionScorer, RewardFunction, start_scoring
from openppo.rewards.function_values import values_of
from openppo.types import Prompt, Score
from openppo.user_code import load_callable

COLUMNS = ("question", "answer")


@pytest.mark.parametrize("folder", [".", "my.pyproject", "x.py", "with space", "~"])
def test_a_file_names_its_function_after_a_colon_or_has_a_reward_fn(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = Path(folder) if folder == "~" else tmp_path / folder
    place.expanduser().mkdir(exist_ok=True)
    (place.expanduser() / "rewards.py").write_text(
        "WEIGHT = 2.0\ndef reward_fn():\n    return WEIGHT\ndef other():\n    return 7.0\n"
    )
    for suffix, score in (("", 2.0), (":reward_fn", 2.0), (":other", 7.0), (":", 2.0)):
        assert load_callable(f"{place}/rewards.py{suffix}", "--reward_fn", "reward_fn")() == score


def test_the_file_is_a_module_like_any_other(tmp_path):
    """Its dataclasses, functions that are pickled for process pools, and a name that the library has too."""
    (tmp_path / "math.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n"
        "@dataclass\nclass Answer:\n    x: float\n"
        "def check(x):\n    import math\n    return math.sqrt(Answer(9.0).x)\n"
        "def reward_fn(prompts):\n    return [pickle.loads(pickle.dumps(check))(p) for p in prompts]\n"
    )
    assert load_callable(str(tmp_path / "math.py"), "--reward_fn", "reward_fn")(["a", "b"]) == [
        3,
        3,
    ]


@pytest.fixture
def all_values(make_tokenizer):
    """Values of several samples."""
    tokenizer = make_tokenizer()
    return lambda samples: [values_of(sample, tokenizer) for sample in samples]


@pytest.fixture
def call(two, all_values):
    """Calls a function with the values of ``two``, or of its first, and returns what it returns."""
    values = all_values(two)
    return lambda function, n=2: RewardFunction(function, "--reward_fn f.py", COLUMNS)(values[:n])


BATCH = {
    "prompts": ["ab", "a"],
    "responses": ["cd", ""],
    "completions": ["cd", ""],
    "labels": [1, {"answer": 2}],
    "queries": ["abcd<eos>", "a<eos>"],
    "rows": [{"question": "ab", "answer": "4"}, {"question": "a", "answer": "5"}],
    "messages": [None, None],
    "token_ids": [[6, 7, 1], [1]],
    "turns": [["cd"], [""]],
    "tool_results": [[], []],
    "sources": ["", ""],
    "tool_rewards": [{}, {}],
}
NAMES_OF_ONE = (
    *("prompt", "response", "completion", "label", "query", "row"),
    *("messages", "token_ids", "turns", "tool_results", "source", "tool_rewards"),
)
SINGLE = {name: values[0] for name, values in zip(NAMES_OF_ONE, BATCH.values(), strict=True)}


class Judge:
    """A function with a state."""

    def __call__(self, response, answer):
        return response, answer


def test_a_function_gets_what_its_parameters_name(call):
    queries, rows, *others = list(BATCH.values())[4:]
    assert call(lambda queries, prompts, labels: (prompts, labels, queries)) == (
        ["ab", "a"],
        BATCH["labels"],
        queries,
    )
    assert call(lambda rows, *, messages, token_ids: [rows, messages, token_ids]) == [
        rows,
        *others[:2],
    ]
    arguments = call(
        lambda query, row, messages, token_ids, turns: [query, row, messages, token_ids, turns], 1
    )
    assert arguments == list(SINGLE.values())[4:-3]
    assert call(lambda completions, answer: (completions, answer)) == (["cd", ""], ["4", "5"])
    assert call(Judge(), 1) == ("cd", "4")
    assert call(functools.partial(Judge(), answer="6"), 1) == ("cd", "4"), (
        "the data wins over a default"
    )
    assert call(lambda response, missing=7: (response, missing), 1) == ("cd", 7)


def test_keyword_arguments_get_everything_as_trl_passes_it(call, make_sample, all_values):
    arguments = call(
        lambda prompts, completions, **kwargs: {
            "prompts": prompts,
            "completions": completions,
            **kwargs,
        }
    )
    assert arguments == {**BATCH, "question": ["ab", "a"], "answer": ["4", "5"]}
    arguments = call(lambda response, **kwargs: {"response": response, **kwargs}, 1)
    assert arguments == {**SINGLE, "question": "ab", "answer": "4"}
    samples = [make_sample([4], [5, 1], row=row) for row in ({"answer": 1}, {"hint": 2})]
    function = RewardFunction(lambda responses, **kwargs: kwargs, "f", ["answer", "hint"])
    arguments = function(all_values(samples))
    assert (arguments["answer"], arguments["hint"]) == ([1, None], [None, 2]), (
        "a row without the column gives None"
    )


def test_a_function_is_told_the_data_source_unless_a_column_has_its_name(
    make_sample, all_values, caplog
):
    samples = [
        make_sample([4], [5, 1], source=name, row={"source": name[0]})
        for name in ("a.jsonl", "b.jsonl")
    ]
    values = all_values(samples)

    def of(function, columns=()):
        return RewardFunction(function, "--reward_fn f.py", columns)(values)

    caplog.set_level(logging.INFO, "openppo")
    assert of(lambda responses, sources: sources) == ["a.jsonl", "b.jsonl"]
    assert of(lambda response, source: source) == "a.jsonl"
    assert of(lambda responses, **kwargs: kwargs["sources"]) == ["a.jsonl", "b.jsonl"]
    assert caplog.messages == []
    assert of(lambda responses, source: source, ["source"]) == ["a", "b"]
    assert of(lambda response, source: source, ["source"]) == "a"
    assert (
        caplog.messages
        == ["--reward_fn f.py: source is a column of the data here, and gets its values"] * 2
    )


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return [data_source, solution_str, ground_truth, extra_info]


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [
        list(each)
        for each in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    ]


def test_rewards_of_tools_are_seen_by_tool(episode, two, all_values):
    earned = {"grade": [-0.05, 1.0], "look": [0.5]}
    played = dataclasses.replace(
        episode, episode=dataclasses.replace(episode.episode, tool_rewards=earned)
    )
    values = all_values([played, two[0]])
    assert RewardFunction(lambda responses, tool_rewards: tool_rewards, "f", ())(values) == [
        earned,
        {},
    ]
    change = RewardFunction(lambda response, tool_rewards: tool_rewards["grade"].pop(), "f", ())
    assert [change(values[:1]), change(values[:1])] == [1.0, 1.0], "of copies"
    column = all_values(
        [dataclasses.replace(two[0], prompt=Prompt("", [4], row={"tool_rewards": 7}))]
    )
    assert (
        RewardFunction(lambda response, tool_rewards: tool_rewards, "f", ["tool_rewards"])(column)
        == 7
    )


@pytest.fixture
def of_verl(make_sample, all_values):
    """Values for a row in verl's form, and for one without its columns."""
    verl = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}}
    first = make_sample([4], [5, 6, 1], label="7", row=verl, source="train.parquet")
    second = make_sample([4], [7, 1], label=8, row={"extra_info": None}, source="own.jsonl")
    return all_values([first, second])


@pytest.mark.parametrize(
    ("column", "value"), [('{"index": 3}', {"index": 3}), ("7", "7"), ("{", "{")]
)
def test_extra_info_is_an_object_also_as_json_text(column, value, make_sample, make_tokenizer):
    sample = make_sample([4], [5, 1], row={"extra_info": column})
    assert values_of(sample, make_tokenizer())["extra_info"] == value


@pytest.mark.parametrize("columns", [(), ("data_source", "extra_info")])
def test_functions_of_verl_get_their_parameters_by_name(columns, of_verl):
    expected = [["openai/gsm8k", "bc", "7", {"index": 3}], ["own.jsonl", "d", 8, {}]]
    single = RewardFunction(compute_score, "f", columns)
    assert [single([values]) for values in of_verl] == expected
    assert RewardFunction(compute_scores, "f", columns)(of_verl) == expected

    def with_others(data_source, solution_str, ground_truth, extra_info, **kwargs):
        assert kwargs.pop("response") == solution_str and "data_source" not in kwargs
        return compute_score(data_source, solution_str, ground_truth, extra_info)

    assert RewardFunction(with_others, "f", columns)(of_verl[:1]) == expected[0]


def test_columns_with_names_of_verl_go_first(make_sample, all_values, caplog):
    caplog.set_level(logging.INFO, "openppo")
    values = all_values([make_sample([4], [5, 1], label=1, row={"ground_truth": 2})])
    assert RewardFunction(compute_score, "f", ["ground_truth"])(values) == ["", "b", 2, {}]
    assert caplog.messages == ["f: ground_truth is a column of the data here, and gets its values"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda data_source, extra_info: 0, "its parameters do not say what it scores"),
        (lambda solution_str, ground_truths: 0, "its parameter 'solution_str' is for one sample"),
        (lambda solution_str, reward_model: 0, "its parameter 'reward_model' is unknown"),
        (lambda prompts, answers: 0, "its parameter 'answers' is unknown. Use prompts, responses"),
        (
            lambda response, labels: 0,
            "its parameter 'response' is for one sample, and others are for a batch",
        ),
        (lambda response, solution: 0, "name columns of the data (answer, question)"),
        (lambda answer, question: 0, "its parameters do not say what it scores"),
        (lambda *args, **kwargs: 0, "its parameters do not say what it scores"),
        (lambda token_ids: 0, "its parameters do not say what it scores"),
    ],
)
def test_parameters_that_nothing_is_known_for_are_an_error(function, message):
    with pytest.raises(ValueError, match="^--reward_fn f.py: ") as error:
        RewardFunction(function, "--reward_fn f.py", COLUMNS)
    assert message in str(error.value)
    assert "or prompt, response, completion, label, query, row" in str(error.value)


def test_what_a_function_changes_in_one_sample_no_other_sees(scorer_of, make_sample):
    def single(response, messages, row, label, token_ids, **columns):
        messages.append({"role": messages[0].pop("role")})
        row.pop("label")
        row["kinds"].append("more")
        label["answers"].clear()
        token_ids.clear()
        columns["kinds"].append("again")
        return float(len(messages))

    def batch(responses, messages, rows, labels, token_ids, **columns):
        samples = zip(messages, rows, labels, token_ids, columns["kinds"], strict=True)
        return [single("", *sample, kinds=kinds) for *sample, kinds in samples]

    row = {"label": {"answers": [1]}, "kinds": ["a"]}
    shared = {"label": row["label"], "row": row, "messages": [{"role": "user", "content": "ask"}]}
    before = copy.deepcopy(shared)
    samples = [make_sample([4], [5, 1], **shared) for _ in range(3)]
    for function in (single, batch) * 2:
        assert numbers(scorer_of(function).score(samples)) == [2.0, 2.0, 2.0]
    assert shared == before
    assert [sample.last.token_ids for sample in samples] == [[4, 5, 1]] * 3


@pytest.fixture
def scorer_of(make_tokenizer):
    """A scorer named as on the command line."""

    def make(function, **options):
        return FunctionScorer(
            RewardFunction(function, "--reward_fn f.py", ()), make_tokenizer(), **options
        )

    return make


def numbers(scores, name="reward"):
    """The rewards of that name, the only ones."""
    assert all(score.rewards.keys() == {name} for score in scores)
    return [score.rewards[name] for score in scores]


@pytest.mark.parametrize(
    "scores",
    [
        [True, 2.5],
        (s for s in (1, 2.5)),
        np.array([1, 2.5], dtype=np.float32),
        [np.float16(1), np.array([[2.5]])],
        torch.tensor([[1], [2.5]], requires_grad=True),
        [torch.tensor(1), torch.tensor([2.5], dtype=torch.bfloat16)],
        {"rewards": [1, 2.5], "extra_logs": {"length": 3}},
    ],
    ids=lambda scores: type(scores).__name__,
)
def test_numbers_of_python_numpy_and_torch_are_scores(scores, scorer_of, two):
    got = numbers(scorer_of(lambda prompts: scores).score(two))
    assert got == [1.0, 2.5]
    assert all(type(score) is float for score in got)


BAD = [
    math.nan,
    None,
    "1",
    np.float32("nan"),
    torch.tensor(-math.inf),
    {"a": None},
    [math.nan],
    10**400,
    1e39,
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_score_that_is_no_finite_number_is_an_error_naming_flag_value_and_prompt(
    bad, scorer_of, two
):
    pattern = r"^--reward_fn f\.py returned .* for prompt 'a'; a finite number is needed"
    with pytest.raises(ValueError, match=pattern):
        scorer_of(lambda prompts: [1.0, bad], error_value=0.0).score(two)


@pytest.mark.parametrize(
    "result", [[], [1.0], [1.0, 2.0, 3.0], {"a": [1.0]}, None, 1.0, "ab", {"a": 1.0}]
)
def test_a_function_of_a_batch_returns_one_result_for_each_sample(result, scorer_of, two):
    message = r"returned (\d scores for 2 samples|.*; a list with one result per sample)"
    with pytest.raises(ValueError, match=rf"--reward_fn f\.py {message}"):
        scorer_of(lambda prompts: result).score(two)
    assert scorer_of(lambda prompts: 1 / 0).score([]) == [], "not called without samples"


async def async_single(response):
    return len(response)


async def async_batch(responses):
    return [len(response) for response in responses]


class AsyncJudge:
    async def __call__(self, response):
        return len(response)


FORMS = {
    "batch": lambda responses: [len(response) for response in responses],
    "sample": lambda response: len(response),
    "async batch": async_batch,
    "async sample": async_single,
    "async object": AsyncJudge(),
    "async partial": functools.partial(async_single),
    "TRL": lambda prompts, completions, **columns: [len(completion) for completion in completions],
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_function_gives_the_same_scores(form, scorer_of, two):
    scorer = scorer_of(FORMS[form], name="reward_fn")
    assert numbers(scorer.score(two), "reward_fn") == [2.0, 0.0]
    assert scorer.function.is_async == form.startswith("async")


@pytest.mark.parametrize(
    "function",
    [
        lambda response: {"length": len(response), "style": 0.5},
        lambda responses: [{"length": len(response), "style": 0.5} for response in responses],
        lambda responses: {
            "length": [len(response) for response in responses],
            "style": np.array([0.5, 0.5]),
        },
    ],
    ids=["sample", "batch", "dict of lists"],
)
def test_dicts_are_named_rewards(function, scorer_of, two):
    scores = scorer_of(function).score(two)
    assert scores == [Score({"length": 2.0, "style": 0.5}), Score({"length": 0.0, "style": 0.5})]


@pytest.mark.parametrize(
    "function",
    [
        lambda response: {
            "reward": len(response),
            "extra": {"half": len(response) / 2, "any": response != ""},
        },
        lambda responses: [
            {"reward": len(r), "extra": {"half": len(r) / 2, "any": r != ""}} for r in responses
        ],
        lambda responses: {
            "reward": [2, 0],
            "extra": {"half": np.array([1, 0]), "any": [True, False]},
        },
        lambda responses: {
            "rewards": [2, 0],
            "extra": {"half": [1, 0], "any": [True, False]},
            "extra_logs": {},
        },
    ],
    ids=["sample", "batch", "dict of lists", "rewards"],
)
def test_extras_are_kept_out_of_the_rewards(function, scorer_of, two):
    expected = [
        ({"reward_fn": 2.0}, {"half": 1.0, "any": 1.0}),
        ({"reward_fn": 0.0}, {"half": 0.0, "any": 0.0}),
    ]
    assert [
        (s.rewards, s.extras) for s in scorer_of(function, name="reward_fn").score(two)
    ] == expected


def test_extras_stand_beside_named_rewards_and_rewards_of_steps(scorer_of, two, steps):
    extra = {"rewards": 0.5}
    for returned in (
        {"a": 1.0, "b": 2.0, "extra": extra},
        {"reward": {"a": 1.0, "b": 2.0}, "extra": extra},
    ):
        assert (
            scorer_of(lambda response, r=returned: r).score(two)
            == [Score({"a": 1.0, "b": 2.0}, extras=extra)] * 2
        )
    columns = {"reward": {"a": [1.0, 3.0]}, "extra": {"rewards": [0.5, 1.5]}}
    scores = scorer_of(lambda responses: columns).score(two)
    assert scores == [Score({"a": 1.0}, extras=extra), Score({"a": 3.0}, extras={"rewards": 1.5})]
    assert scorer_of(lambda response: {"a": 1.0, "extra": 2.0}).score(two[:1]) == [
        Score({"a": 1.0, "extra": 2.0})
    ]
    (score,) = scorer_of(
        lambda response: {"reward": [1, 0, 3], "extra": extra}, step_separator="z"
    ).score([steps])
    assert (score.token_rewards[-2:], score.extras) == ([3.0, 0.0], extra)
    with pytest.raises(
        ValueError, match="^--reward_fn f.py, as extra 'kind', returned 'good' for prompt 'ab'; a"
    ):
        scorer_of(lambda response: {"reward": 1.0, "extra": {"kind": "good"}}).score(two)


GRADED = {
    "score": 0.5,
    "acc": True,
    "n": np.int64(3),
    "pred": "72",
    "spans": [1, 2],
    "bad": math.nan,
    "none": None,
}
GRADES = {"acc": 1.0, "n": 3.0}, {"pred": "72", "spans": "[1, 2]", "bad": "nan", "none": "None"}


@pytest.mark.parametrize(
    "function",
    [
        lambda response: GRADED,
        lambda responses: [GRADED, GRADED],
        lambda responses: {name: [value, value] for name, value in GRADED.items()},
        lambda response: {"reward": GRADED, "extra": {}},
    ],
    ids=["sample", "batch", "dict of lists", "in a reward"],
)
def test_a_score_alone_is_the_reward(function, scorer_of, two):
    extras, notes = GRADES
    expected = Score({"reward_fn": 0.5}, extras=extras, notes=notes)
    assert scorer_of(function, name="reward_fn").score(two) == [expected] * 2


def test_weights_of_other_keys_make_all_numbers_rewards(scorer_of, two):
    graded = {"score": -1, "acc": False, "pred": "72", "none": None}
    for weighted in (["acc"], ["score", "acc"], ["reward_model", "acc"]):
        (score,) = scorer_of(lambda response: graded, weighted=weighted).score(two[:1])
        assert score == Score({"score": -1.0, "acc": 0.0}, notes={"pred": "72", "none": "None"})
    (score,) = scorer_of(lambda response: graded, weighted=["score"]).score(two[:1])
    assert score.rewards == {"score": -1.0}, "under the name that the weight is for"
    (score,) = scorer_of(lambda response: graded, weighted=["reward_model"]).score(two[:1])
    assert score.rewards == {"reward": -1.0}
    with pytest.raises(
        ValueError, match="a list as 'score', .* no such name: use --reward_weights reward=NUMBER"
    ):
        scorer_of(lambda response: {"score": [1, 0, 3]}, weighted=["score"]).score(two[:1])


@pytest.mark.parametrize(("bad", "weighted"), [("1", ()), (math.nan, ()), ("1", ["acc"])])
def test_a_score_of_a_dict_must_be_a_number(bad, weighted, scorer_of, two):
    with pytest.raises(
        ValueError, match="^--reward_fn f.py returned .* for prompt 'ab'; a finite number is needed"
    ):
        scorer_of(lambda response: {"score": bad, "acc": 1}, weighted=weighted).score(two[:1])


def test_extras_and_long_texts_stand_beside_a_score(scorer_of, two):
    graded = {"score": 1.0, "acc": 1, "pred": "x" * 10_000 + "\ud800", "extra": {"acc": 2, "n": 3}}
    (score,) = scorer_of(lambda response: graded).score(two[:1])
    assert (score.rewards, score.extras) == ({"reward": 1.0}, {"acc": 2.0, "n": 3.0})
    assert score.notes == {"pred": "x" * 497 + "..."}
    (score,) = scorer_of(lambda response: {"score": [1, 0, 3], "pred": "\ud800"}).score(two[:1])
    assert (score.token_rewards[-3:], score.notes) == ([1.0, 0.0, 3.0], {"pred": "?"})


def test_the_log_names_once_the_keys_that_are_only_logged(scorer_of, two, caplog):
    caplog.set_level(logging.INFO, "openppo")
    graded = {"score": 1.0, "acc": 1, "pred": "72"}
    begin = "--reward_fn f.py returns a dict with 'score', which alone is the reward: acc, pred are only logged."
    for weighted, end in (
        ((), "name them: --reward_weights score=1 acc=1."),
        (None, "return no key 'score'."),
    ):
        caplog.clear()
        scorer = scorer_of(lambda response: graded, weighted=weighted)
        assert len(scorer.score(two) + scorer.score(two)) == 4
        assert caplog.messages == [f"{begin} To sum them, {end}"]
    caplog.clear()
    scorer_of(lambda response: {"score": 1.0, "pred": ""}).score(two)
    scorer_of(lambda response: {"score": 1.0}).score(two)
    assert caplog.messages == [begin.replace("acc, pred are", "pred is")]


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
    assert sorted(numbers(start_scoring(scorer, two)())) == [3.0, 4.0]
    assert len(set(map(id, loops))) == 1, (
        "a client that was made in the first call still works in the second"
    )


def test_a_function_always_runs_on_one_thread_with_the_gpu_of_the_rank(scorer_of, two, monkeypatch):
    chosen: dict[threading.Thread, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: chosen.update({threading.current_thread(): gpu})
    )

    async def gpu_of_this_thread():
        return chosen[threading.current_thread()]

    scorer = scorer_of(
        lambda response: asyncio.run(gpu_of_this_thread())
    )  # it may run a loop of its own
    assert numbers(scorer.score(two)) == numbers(start_scoring(scorer, two)()) == [3, 3]
    assert len(chosen) == 1
    assert threading.main_thread() not in chosen


@pytest.fixture
def steps(make_sample):
    """Response "ab cd x" in letters, with z between its steps: a b z c d z x and EOS."""
    return make_sample([4], [4, 5, 29, 6, 7, 29, 27, 1])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_list_as_long_as_the_response_rewards_its_tokens(kind, scorer_of, steps):
    rewards = [0.5, 0, 0, -1, 0, 0, 0, 2]
    (score,) = scorer_of(lambda response: kind(rewards)).score([steps])
    assert score == Score(token_rewards=[0.0, 0.5, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 2.0]), (
        "the first is the prompt"
    )


def test_a_list_with_one_number_per_step_rewards_the_last_token_of_each(
    scorer_of, steps, make_sample
):
    for weight in (1.0, 0.5):
        scorer = scorer_of(lambda response: [1, 0, 3], step_separator="z", token_weight=weight)
        ends = [
            False,
            False,
            True,
            False,
            False,
            True,
            False,
            True,
            False,
        ]  # a reward of 0 is a reward
        expected = [0.0, 0.0, weight, 0.0, 0.0, 0.0, 0.0, 3.0 * weight, 0.0]
        assert scorer.score([steps]) == [Score(token_rewards=expected, step_ends=ends)]
    scorer = scorer_of(lambda response: [1, 2], step_separator="x")
    scorer.tokenizer.add_tokens(["axb"])
    token = scorer.tokenizer.convert_tokens_to_ids("axb")
    scores = scorer.score([make_sample([4], [token, after, 1]) for after in (29, 27)])
    assert scores[0].token_rewards == [0.0, 1.0, 2.0, 0.0], "b goes on into the next token"
    assert scores[1].token_rewards == [0.0, 3.0, 0.0, 0.0], (
        "the rewards of two steps in one token add up"
    )


@pytest.mark.parametrize("n", [0, 1, 4, 9])
def test_a_list_of_another_length_is_an_error_with_all_counts(n, scorer_of, steps):
    counts = (
        rf"returned {n} numbers for prompt 'ask', .* 8 tokens and 3 steps .*--step_separator 'z'"
    )
    with pytest.raises(ValueError, match=counts):
        scorer_of(lambda response: [0.0] * n, step_separator="z").score([steps])


def picky(prompt):
    """Raises for the prompt "a"."""
    return {"ab": 7.0}[prompt]


async def async_picky(prompt):
    return picky(prompt)


RAISING = {
    "batch": lambda prompts: [picky(prompt) for prompt in prompts],
    "lazily": lambda prompts: map(picky, prompts),
    "single": picky,
    "async": async_picky,
}


@pytest.mark.parametrize("form", RAISING)
def test_an_exception_ends_the_run_naming_the_sample_or_costs_a_chosen_value(
    form, scorer_of, two, caplog
):
    pattern = r"^--reward_fn f.py raised KeyError\('a'\) for prompt 'a'\. .*--reward_error_value"
    with pytest.raises(RuntimeError, match=pattern) as error:
        scorer_of(RAISING[form]).score(two)
    assert isinstance(error.value.__cause__, KeyError)
    assert error.value.__cause__.__traceback__ is not None
    caplog.set_level(logging.WARNING, "openppo")
    scores = scorer_of(RAISING[form], error_value=-1.5).score(two)
    assert scores == [
        Score({"reward": 7.0}),
        Score({"reward": -1.5}, failed=True, error="KeyError('a') for prompt 'a'"),
    ]
    (line,) = caplog.messages
    assert "raised on 1 of 2 samples, whose reward is --reward_error_value -1.5" in line
    assert "KeyError('a') for prompt 'a'" in line


def test_a_batch_that_raises_is_tried_sample_by_sample(scorer_of, two):
    calls = []

    def reward_fn(prompts):
        calls.append(prompts)
        if len(prompts) > 1:
            raise OverflowError("too many")
        return [1.0]

    with pytest.raises(
        RuntimeError, match="OverflowError.* a batch of 2 samples, but for none of them alone"
    ):
        scorer_of(reward_fn).score(two)
    assert calls == [["ab", "a"], ["ab"], ["a"]]
    assert numbers(scorer_of(reward_fn, error_value=0.0).score(two)) == [1.0, 1.0]


async def leave_async(response):
    raise SystemExit(0)


@pytest.mark.parametrize("function", [lambda response: sys.exit(0), leave_async])
def test_sys_exit_of_a_function_is_an_error(function, scorer_of, two):
    with pytest.raises(RuntimeError, match="^--reward_fn f.py raised SystemExit"):
        scorer_of(function, error_value=0.0).score(two[:1])


def test_a_function_reads_and_rewards_the_actions(scorer_of, game):
    seen = []
    for rewards, expected in (
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 0, 0, 3, 4, 5, 6]),
        ([1, 2, 3], [0, 0, 0, 1, 0, 0, 2, 0, 3, 0]),  # a step ends with its turn: "cd", "c" and "d"
    ):

        def reward_fn(response, token_ids, query, rewards=rewards):
            seen.append((response, token_ids, query))
            return rewards

        (score,) = scorer_of(reward_fn, step_separator="z").score([game])
        assert score.token_rewards == expected
    assert score.step_ends == [reward > 0 for reward in expected]
    assert seen == [("cd\nczd", [6, 7, 6, 29, 7, 1], "abcdefczd<eos>")] * 2


def test_a_function_gets_an_episode_whole_or_its_last_answer(episode, make_tokenizer):
    values = values_of(episode, make_tokenizer())
    expected = {
        "prompt": "ab",
        "response": "czd",
        "completion": "czd",
        "turns": ["cd", "czd"],
        "tool_results": ["ef"],
    }
    assert {name: values[name] for name in expected} == expected
    assert (values["messages"], values["query"]) == (episode.episode.messages, "abcdefczd<eos>")
    old = RewardFunction(lambda queries, prompts, labels: [queries, prompts, labels], "f", ())
    assert old([values]) == [["abcdefczd<eos>"], ["ab"], ["czd"]]
    new = RewardFunction(
        lambda turns, tool_results, response: (len(turns), tool_results, response), "f", ()
    )
    assert new([values]) == (2, ["ef"], "czd")
