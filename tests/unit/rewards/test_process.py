"""Process rewards: p(good) at each placeholder, put where the step ends in the response or made into one number."""

from typing import Any

import pytest
import torch

from openppo.config import RewardConfig
from openppo.models.padding import MicroBatchSize
from openppo.models.scalar_head import ProcessRewardModel
from openppo.rewards.model import equal_batches
from openppo.rewards.process import ProcessScorer, StepText
from openppo.types import FinishReason, Prompt, SingleProcess, Trajectory

PLACEHOLDER, GOOD, BAD, STEP = 20, 21, 22, 15  # the ids of q, r, s and l; "l" separates steps
RESPONSES = ["ablcldefla", "a", "", "ll", "bcld", "eeelfff"]
STEPS = [["ab", "c", "def", "a"], ["a"], [], [], ["bc", "d"], ["eee", "fff"]]
ENDS = [[1, 3, 7, 9], [0], [], [], [1, 3], [2, 6]]


def trajectory(response, tokenizer):
    prompt_ids = tokenizer("hi")["input_ids"]
    ids = prompt_ids + tokenizer(response)["input_ids"] + [tokenizer.eos_token_id]
    mask = [place >= len(prompt_ids) for place in range(len(ids))]
    rest: Any = (mask, [0.0] * len(ids), [0] * len(ids))
    return Trajectory(ids, *rest, FinishReason.STOP, Prompt("hi", prompt_ids), group=0)


def scorer_of(model, tokenizer, micro=2, context=None, **options):
    """Reads "hi", then each step and "q" after it, without separators."""

    def render(prompt, steps):
        ids, places = tokenizer(prompt.text)["input_ids"], []
        for step in steps:
            ids = [*ids, *tokenizer(step.removeprefix("l"))["input_ids"], PLACEHOLDER]
            places.append(len(ids) - 1)
        return ids, places

    text = StepText(tokenizer, tokenizer, render, "l", "--prm_pretrain judge", context)
    source = RewardConfig(prm_pretrain="judge", **options)
    return ProcessScorer(model, text, (GOOD, BAD), source, MicroBatchSize(micro), SingleProcess(), torch.device("cpu"))


@pytest.mark.parametrize("micro", [1, 2, 9])
def test_the_last_token_of_a_step_gets_the_probability_of_good_at_its_placeholder(models, make_tokenizer, micro):
    tokenizer, model = make_tokenizer(), models["llama"]
    samples = [trajectory(response, tokenizer) for response in RESPONSES]
    scorer = scorer_of(ProcessRewardModel(model), tokenizer, micro, reward_weights=("prm=2",))
    for sample, score, steps, ends in zip(samples, scorer.score(samples), STEPS, ENDS, strict=True):
        expected = [0.0] * len(sample.token_ids)
        read = "hi"
        for step, end in zip(steps, ends, strict=True):
            read += step + "q"
            logits = model(torch.tensor([tokenizer(read)["input_ids"]])).logits[0, -1]
            expected[len("hi") + end] = 2 * (logits[GOOD].exp() / (logits[GOOD].exp() + logits[BAD].exp())).item()
        assert score.rewards == {}
        assert score.token_rewards == pytest.approx(expected, abs=1e-5)


def says(probabilities):
    """A model that gives the steps of a single response these probabilities of being good."""

    def model(sequences, places):
        logits = torch.zeros(len(probabilities), 24)
        logits[:, GOOD] = torch.tensor(probabilities).logit()
        return logits

    return model


@pytest.mark.parametrize(("aggregate", "reward"), [("min", 0.2), ("mean", 0.5), ("last", 0.4), ("product", 0.072)])
def test_steps_become_one_reward(make_tokenizer, aggregate, reward):
    tokenizer = make_tokenizer()
    scorer = scorer_of(says([0.9, 0.2, 0.4]), tokenizer, prm_aggregate=aggregate)
    [score] = scorer.score([trajectory("ablcld", tokenizer)])
    assert score.token_rewards is None
    assert score.rewards == {"prm": pytest.approx(reward)}
    [blank] = scorer_of(says([]), tokenizer, prm_aggregate=aggregate).score([trajectory("ll", tokenizer)])
    assert blank.rewards == {"prm": 0.0}


def test_a_judgement_that_is_no_number_names_its_source_and_sample(make_tokenizer):
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="--prm_pretrain judge returned nan for prompt 'hi'"):
        scorer_of(says([float("nan")]), tokenizer).score([trajectory("a", tokenizer)])


def test_steps_before_the_context_of_the_model_are_not_judged(make_tokenizer, caplog):
    tokenizer = make_tokenizer()
    scorer = scorer_of(says([0.25, 0.75]), tokenizer, context=4)  # of "hiabqcqdq"
    [score] = scorer.score([trajectory("ablcld", tokenizer)])
    assert score.token_rewards == pytest.approx([0, 0, 0, 0, 0, 0.25, 0, 0.75, 0])
    assert score.step_ends == [False, False, False, False, False, True, False, True, False]
    assert "--prm_pretrain judge reads 4 tokens, but prompt 'hi' has 9 of its tokens" in caplog.text


def test_every_rank_has_as_many_batches_as_the_rank_with_the_most():
    class Other(SingleProcess):
        def all_reduce(self, tensor, op="sum"):
            assert op == "max"
            return tensor.clamp(min=4)

    assert equal_batches([3, 0, 7, 7, 0], MicroBatchSize(2), Other()) == [[2, 3], [0], [], []]
    assert equal_batches([], MicroBatchSize(2), SingleProcess()) == []


def test_batches_hold_no_more_tokens_than_the_budget():
    assert equal_batches([30, 9, 10, 0, 8], MicroBatchSize(8, 30), SingleProcess()) == [[0], [2, 1, 4]]
