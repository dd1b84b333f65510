"""Reward functions of users: where they are found, and what they are called with."""

import functools

import pytest

from openppo.rewards import as_reward_function, load_reward_function
from openppo.rewards.function import make_samples

COLUMNS = ("question", "answer")


def load(location):
    """The function itself."""
    return load_reward_function(location, COLUMNS).function


# Where the function is


@pytest.fixture
def rewards_file(tmp_path):
    """A file with two functions, a constant and a private helper."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "WEIGHT = 2.0\n"
        "def _helper():\n    return WEIGHT\n"
        "def reward_fn(prompts, responses, labels):\n    return [_helper()] * len(prompts)\n"
        "def other(prompts, responses, labels):\n    return [7.0] * len(prompts)\n"
    )
    return file


@pytest.mark.parametrize(("suffix", "score"), [("", 2.0), (":reward_fn", 2.0), (":other", 7.0), (":", 2.0)])
def test_a_file_names_its_function_after_a_colon_or_has_a_reward_fn(suffix, score, rewards_file):
    function = load(f"{rewards_file}{suffix}")
    assert function(["a"], ["b"], [None]) == [score]


@pytest.mark.parametrize("folder", [".pyenv", "my.pyproject", "x.py", "with space"])
def test_the_file_may_lie_in_any_folder(folder, rewards_file):
    place = rewards_file.parent / folder
    place.mkdir()
    moved = rewards_file.rename(place / "rewards.py")
    assert load(f"{moved}:other")(["a"], ["b"], [None]) == [7.0]
    assert load(str(moved))(["a"], ["b"], [None]) == [2.0]


def test_a_home_folder_is_expanded(rewards_file, monkeypatch):
    monkeypatch.setenv("HOME", str(rewards_file.parent))
    assert load("~/rewards.py:other")(["a"], ["b"], [None]) == [7.0]


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Answer:\n    x: int\n"
        "def reward_fn(prompts, responses, labels):\n    return [Answer(3).x] * len(prompts)\n",
        "import pickle\ndef check(x):\n    return 3\n"
        "def reward_fn(prompts, responses, labels):\n"
        "    return [pickle.loads(pickle.dumps(check))(p) for p in prompts]\n",
    ],
    ids=["dataclass with postponed annotations", "pickled function, as process pools need"],
)
def test_the_file_is_a_module_like_any_other(source, tmp_path):
    file = tmp_path / "special.py"
    file.write_text(source)
    assert load(str(file))(["a", "b"], ["", ""], [None, None]) == [3, 3]


def test_a_file_named_like_a_library_does_not_take_its_place(tmp_path):
    file = tmp_path / "math.py"
    file.write_text("def reward_fn(prompts, responses, labels):\n    import math\n    return [math.sqrt(4.0)]\n")
    assert load(str(file))(["a"], [""], [None]) == [2.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{folder}/nowhere.py", "no such file {folder}/nowhere.py. Check the path."),
        ("{folder}/nowhere.py:other", "no such file {folder}/nowhere.py. Check the path."),
        ("{folder}/rewards.py,{folder}/other.py", "Give one file: its function can call those of others."),
        ("{folder}/rewards.py:missing", "has no function 'missing'. It has: other, reward_fn. Name one of them as"),
        ("{folder}/rewards.py:WEIGHT", "has no function 'WEIGHT'. It has: other, reward_fn."),
        ("{folder}/needs.py", "cannot be imported (No module named 'not_there')"),
        ("{folder}/syntax.py", "cannot be imported (invalid syntax (syntax.py, line 1))"),
        ("{folder}/empty.py", "has no function 'reward_fn'. It has: none."),
        ("{folder}/rewards.txt", "give a Python file, path.py or path.py:name."),
        ("{folder}/rewards", "give a Python file, path.py or path.py:name."),
        ("rewards:other", "give a Python file, path.py or path.py:name."),
        ("", "give a Python file, path.py or path.py:name."),
    ],
)
def test_a_function_that_cannot_be_found_is_an_error_naming_the_flag_and_the_remedy(source, message, rewards_file):
    folder = rewards_file.parent
    (folder / "empty.py").write_text("x = 1\n")
    (folder / "rewards.txt").write_text("")
    (folder / "needs.py").write_text("import not_there\n")
    (folder / "syntax.py").write_text("x = = 1\n")
    source = source.format(folder=folder)
    with pytest.raises(ValueError, match="^--reward_fn") as error:
        load(source)
    assert f"--reward_fn {source}: " in str(error.value)
    assert message.format(folder=folder) in str(error.value)


# What it is called with


@pytest.fixture
def call(two, make_tokenizer):
    """Calls a function with the samples of ``two``, or the first of them, and returns what it returns."""
    samples = make_samples(two, make_tokenizer())

    def run(function, n=2):
        return as_reward_function(function, "--reward_fn f.py", COLUMNS)(samples[:n])

    return run


BATCH = {
    "prompts": ["ab", "a"],
    "responses": ["cd", ""],
    "completions": ["cd", ""],
    "labels": [1, {"answer": 2}],
    "queries": ["abcd<eos>", "a<eos>"],
    "rows": [{"question": "ab", "answer": "4"}, {"question": "a", "answer": "5"}],
    "messages": [None, None],
    "token_ids": [[6, 7, 1], [1]],
}
SINGLE = {
    "prompt": "ab",
    "response": "cd",
    "completion": "cd",
    "label": 1,
    "query": "abcd<eos>",
    "row": {"question": "ab", "answer": "4"},
    "messages": None,
    "token_ids": [6, 7, 1],
}


def by_position(*arguments):
    """Everything by position."""
    return arguments


class Judge:
    """A function with a state."""

    def __call__(self, response, answer):
        return response, answer


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompts, responses, labels: (prompts, responses, labels), ["prompts", "responses", "labels"]),
        (lambda queries, prompts, labels: (queries, prompts, labels), ["queries", "prompts", "labels"]),
        (lambda a, b, c: (a, b, c), ["prompts", "responses", "labels"]),
        (lambda a, b, c, weight=2: (a, b, c), ["prompts", "responses", "labels"]),
        (lambda a, *rest: (a, *rest), ["prompts", "responses", "labels"]),
        (by_position, ["prompts", "responses", "labels"]),
        (lambda rows, messages, token_ids: (rows, messages, token_ids), ["rows", "messages", "token_ids"]),
        (lambda completions, *, labels: (completions, labels), ["completions", "labels"]),
        (lambda responses, /, labels: (responses, labels), ["responses", "labels"]),
    ],
)
def test_a_function_of_a_batch_gets_the_lists_that_it_names(function, expected, call):
    assert list(call(function)) == [BATCH[name] for name in expected]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompt, response, label: (prompt, response, label), ["prompt", "response", "label"]),
        (lambda completion: [completion], ["completion"]),
        (lambda query, row, messages, token_ids: (query, row, messages, token_ids), list(SINGLE)[4:]),
    ],
)
def test_a_function_of_a_sample_gets_the_values_that_it_names(function, expected, call):
    assert list(call(function, 1)) == [SINGLE[name] for name in expected]


def test_columns_of_the_data_are_passed_by_name(call):
    assert call(lambda completions, answer: (completions, answer)) == (["cd", ""], ["4", "5"])
    assert call(lambda response, question, answer: (response, question, answer), 1) == ("cd", "ab", "4")
    assert call(Judge(), 1) == ("cd", "4")
    assert call(functools.partial(Judge(), answer="6"), 1) == ("cd", "4"), "the data wins over a default"
    assert call(lambda response, missing=7: (response, missing), 1) == ("cd", 7)


def test_keyword_arguments_get_everything_as_trl_passes_it(call):
    given = call(lambda prompts, completions, **kwargs: {"prompts": prompts, "completions": completions, **kwargs})
    assert given == {**BATCH, "question": ["ab", "a"], "answer": ["4", "5"]}
    assert call(lambda response, **kwargs: kwargs, 1) == {
        **{name: value for name, value in SINGLE.items() if name != "response"},
        "question": "ab",
        "answer": "4",
    }


def test_a_row_without_the_column_gives_none(make_trajectory, make_tokenizer):
    trajectories = [make_trajectory([4], [5, 1], row={"answer": 1}), make_trajectory([4], [5, 1], row={"hint": 2})]
    samples = make_samples(trajectories, make_tokenizer())
    function = as_reward_function(lambda responses, **kwargs: kwargs, "f", ["answer", "hint"])
    given = function(samples)
    assert (given["answer"], given["hint"]) == ([1, None], [None, 2])


def test_an_async_function_is_known_as_one():
    async def judge(response):
        return 1.0

    class AsyncJudge:
        async def __call__(self, response):
            return 1.0

    for function in (judge, AsyncJudge(), functools.partial(judge)):
        assert as_reward_function(function, "f", ()).is_async
    assert not as_reward_function(Judge(), "f", COLUMNS).is_async


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, answers: 0, "its parameter 'answers' is unknown. Use prompts, responses"),
        (lambda response, labels: 0, "its parameter 'response' is for one sample, and others are for a batch"),
        (lambda response, solution: 0, "name columns of the data (answer, question)"),
        (lambda a, b: 0, "its parameter 'a' is unknown"),
        (lambda answer, question: 0, "its parameters do not say what it scores"),
        (lambda **kwargs: 0, "its parameters do not say what it scores"),
        (lambda: 0, "its parameters do not say what it scores"),
        (lambda token_ids: 0, "its parameters do not say what it scores"),
    ],
)
def test_parameters_that_nothing_is_known_for_are_an_error(function, message):
    with pytest.raises(ValueError, match="^--reward_fn f.py: ") as error:
        as_reward_function(function, "--reward_fn f.py", COLUMNS)
    assert message in str(error.value)
    assert "or prompt, response, completion, label, query, row" in str(error.value)


def test_the_flag_and_the_default_name_are_those_of_the_option(rewards_file):
    with pytest.raises(ValueError, match="^--remote_rm_url .*: .* has no function 'reward_func'"):
        load_reward_function(str(rewards_file), COLUMNS, "--remote_rm_url", "reward_func")
