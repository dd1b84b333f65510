"""Scores: what a reward function is given and may return, where a reward model is read, and errors that help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from openppo.models.scalar_head import ScalarHeadModel
from openppo.rollout.rewards import FunctionScorer, ModelScorer, check_scores, load_reward_function
from openppo.types import FinishReason, Prompt, SingleProcess, Trajectory

MakeTokenizer = Callable[..., Any]


def trajectory(prompt_ids: list[int], response_ids: list[int], text: str = "ask", label: Any = None) -> Trajectory:
    """A scored sample-to-be; only its tokens, its prompt's text and its label matter here."""
    n_prompt, n_response = len(prompt_ids), len(response_ids)
    return Trajectory(
        token_ids=prompt_ids + response_ids,
        action_mask=[False] * n_prompt + [True] * n_response,
        log_probs=[0.0] * (n_prompt + n_response),
        versions=[0] * (n_prompt + n_response),
        finish_reason=FinishReason.EOS,
        prompt=Prompt(text, prompt_ids, label),
        group=0,
    )


TWO = [trajectory([4, 5], [6, 7, 1], text="ab", label=1), trajectory([4], [1], text="a", label={"answer": 2})]


def scorer_of(function: Callable[..., Any], tokenizer: Any) -> FunctionScorer:
    """A scorer named as on the command line."""
    return FunctionScorer(function, "mine.py", tokenizer)


# A Python function


def test_a_reward_function_gets_texts_without_special_tokens_and_labels(make_tokenizer: MakeTokenizer) -> None:
    calls = []

    def reward_fn(prompts: list[str], responses: list[str], labels: list[Any]) -> list[float]:
        calls.append((prompts, responses, labels))
        return [0.5, -2]

    assert scorer_of(reward_fn, make_tokenizer()).score(TWO) == [0.5, -2.0]
    assert calls == [(["ab", "a"], ["cd", ""], [1, {"answer": 2}])]


def test_a_reward_function_is_not_called_without_samples(make_tokenizer: MakeTokenizer) -> None:
    assert scorer_of(lambda *_: 1 / 0, make_tokenizer()).score([]) == []


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
    ],
    ids=lambda scores: f"{type(scores).__name__}: {str(scores)[:40]}",
)
def test_numbers_of_python_numpy_and_torch_are_scores(scores: Any, make_tokenizer: MakeTokenizer) -> None:
    got = scorer_of(lambda *_: scores, make_tokenizer()).score(TWO)
    assert got == [1.0, 2.5]
    assert all(type(score) is float for score in got)


@pytest.mark.parametrize(
    "bad",
    [math.nan, math.inf, -math.inf, None, "1", np.float32("nan"), torch.tensor(math.inf), [1.0], np.array([1.0, 2.0])],
    ids=repr,
)
def test_a_score_that_is_no_finite_number_is_an_error_naming_flag_value_and_prompt(
    bad: Any, make_tokenizer: MakeTokenizer
) -> None:
    with pytest.raises(ValueError, match=r"--reward_fn mine\.py returned .* for prompt 'a'; a finite number") as error:
        scorer_of(lambda *_: [1.0, bad], make_tokenizer()).score(TWO)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_wrong_number_of_scores_is_an_error_with_both_numbers(
    scores: list[float], make_tokenizer: MakeTokenizer
) -> None:
    with pytest.raises(ValueError, match=rf"--reward_fn mine\.py returned {len(scores)} scores for 2 samples"):
        scorer_of(lambda *_: scores, make_tokenizer()).score(TWO)


@pytest.mark.parametrize("result", [None, 1.0])
def test_a_function_that_forgets_its_list_is_an_error_naming_it(result: Any, make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=rf"--reward_fn mine\.py returned {result}; a list"):
        scorer_of(lambda *_: result, make_tokenizer()).score(TWO)


def test_an_error_of_the_function_itself_is_not_hidden(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ZeroDivisionError):
        scorer_of(lambda *_: 1 / 0, make_tokenizer()).score(TWO)


def test_scores_are_checked_under_the_name_of_their_source() -> None:
    with pytest.raises(ValueError, match="the reward model returned nan"):
        check_scores([math.nan, 0.0], TWO, "the reward model")


# Where the function is


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
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
def test_a_file_names_its_function_after_a_colon_or_has_a_reward_fn(
    suffix: str, score: float, rewards_file: Path
) -> None:
    function = load_reward_function(f"{rewards_file}{suffix}")
    assert function(["a"], ["b"], [None]) == [score]


@pytest.mark.parametrize("folder", [".pyenv", "my.pyproject", "x.py", "with space"])
def test_the_file_may_lie_in_any_folder(folder: str, rewards_file: Path) -> None:
    place = rewards_file.parent / folder
    place.mkdir()
    moved = rewards_file.rename(place / "rewards.py")
    assert load_reward_function(f"{moved}:other")(["a"], ["b"], [None]) == [7.0]
    assert load_reward_function(str(moved))(["a"], ["b"], [None]) == [2.0]


def test_a_home_folder_is_expanded(rewards_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(rewards_file.parent))
    assert load_reward_function("~/rewards.py:other")(["a"], ["b"], [None]) == [7.0]


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
def test_the_file_is_a_module_like_any_other(source: str, tmp_path: Path) -> None:
    file = tmp_path / "special.py"
    file.write_text(source)
    assert load_reward_function(str(file))(["a", "b"], ["", ""], [None, None]) == [3, 3]


def test_a_file_named_like_a_library_does_not_take_its_place(tmp_path: Path) -> None:
    file = tmp_path / "math.py"
    file.write_text("def reward_fn(prompts, responses, labels):\n    import math\n    return [math.sqrt(4.0)]\n")
    assert load_reward_function(str(file))(["a"], [""], [None]) == [2.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{folder}/nowhere.py", "no such file {folder}/nowhere.py. Check the path."),
        ("{folder}/nowhere.py:other", "no such file {folder}/nowhere.py. Check the path."),
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
def test_a_function_that_cannot_be_found_is_an_error_naming_the_flag_and_the_remedy(
    source: str, message: str, rewards_file: Path
) -> None:
    folder = rewards_file.parent
    (folder / "empty.py").write_text("x = 1\n")
    (folder / "rewards.txt").write_text("")
    (folder / "needs.py").write_text("import not_there\n")
    (folder / "syntax.py").write_text("x = = 1\n")
    source = source.format(folder=folder)
    with pytest.raises(ValueError, match="^--reward_fn") as error:
        load_reward_function(source)
    assert f"--reward_fn {source}: " in str(error.value)
    assert message.format(folder=folder) in str(error.value)


# A reward model


class CountingModel:
    """Scores a row by its real length and last real token; remembers the shapes of its batches."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(sequences.shape))
        lengths = attention_mask.sum(-1)
        return lengths * 100.0 + sequences.gather(1, lengths[:, None] - 1)[:, 0]


class OthersHaveMore(SingleProcess):
    """Some other rank has ``n`` batches."""

    def __init__(self, n: int) -> None:
        self.n = n

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The maximum over ranks."""
        assert op == "max"
        return torch.maximum(tensor, torch.tensor(self.n))


def model_scorer(model: Any, micro_batch_size: int = 2, comm: Any = None, pad: int = 0) -> ModelScorer:
    """A scorer on the CPU."""
    return ModelScorer(model, micro_batch_size, pad, comm or SingleProcess(), torch.device("cpu"))


SAMPLES = [trajectory([4], list(range(5, 5 + n))) for n in (3, 1, 6, 2, 6)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_scores_keep_the_order_of_the_samples_whatever_the_micro_batch_size(size: int) -> None:
    model = CountingModel()
    scores = model_scorer(model, size).score(SAMPLES)
    assert scores == [407.0, 205.0, 710.0, 306.0, 710.0]
    assert len(model.shapes) == math.ceil(len(SAMPLES) / size)


def test_neighbours_in_length_share_a_forward() -> None:
    model = CountingModel()
    model_scorer(model, 2).score(SAMPLES)
    assert model.shapes == [(2, 7), (2, 4), (1, 2)]


@pytest.mark.parametrize("samples", [SAMPLES, []], ids=["some samples", "no samples"])
def test_a_rank_runs_as_many_forwards_as_the_rank_with_the_most(samples: list[Trajectory]) -> None:
    model = CountingModel()
    scores = model_scorer(model, 2, OthersHaveMore(7)).score(samples)
    assert len(model.shapes) == 7
    assert scores == model_scorer(CountingModel(), 2).score(samples)


@pytest.mark.parametrize("pad", [0, 1, 9])
def test_a_reward_model_is_read_at_the_last_real_token_whatever_fills_the_padding(pad: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=None,
    )
    classifier = LlamaForSequenceClassification(config).eval()
    scores = model_scorer(ScalarHeadModel(classifier, "reward"), 3, pad=pad).score(SAMPLES)

    def by_transformers(ids: Sequence[int]) -> float:  # alone, without padding: transformers reads the last token
        with torch.no_grad():
            hidden = classifier.model(torch.tensor([ids])).last_hidden_state
            return float(classifier.score(hidden)[0, -1, 0])

    np.testing.assert_allclose(scores, [by_transformers(t.token_ids) for t in SAMPLES], atol=1e-5)


def test_a_reward_model_that_gives_nan_is_an_error_naming_it() -> None:
    with pytest.raises(ValueError, match="the reward model returned nan for prompt 'ask'"):
        model_scorer(lambda sequences, _: torch.full((len(sequences),), math.nan)).score(SAMPLES)
