"""Samples in one call; only their tokens, texts and labels matter to rewards."""

import dataclasses

import pytest
import torch

from openppo.types import Completion, Ending, Episode, FinishReason, Prompt, Sample
from tests.samples import one_segment


@pytest.fixture(scope="session")
def make_sample():
    """``make_sample(prompt_ids, response_ids, text=, label=, row=, messages=, truncated=)``."""

    def make(prompt_ids, response_ids, text="ask", truncated=False, **prompt):
        completion = Completion(
            response_ids,
            log_probs=[0.0] * len(response_ids),
            versions=[0] * len(response_ids),
            finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        )
        return Sample.of_response(Prompt(text, prompt_ids, **prompt), completion, group=0)

    return make


@torch.no_grad()
def score_by_transformers(classifier, ids):
    """The score of one row alone, without padding: the head at the last token."""
    hidden = classifier.model(torch.tensor([ids])).last_hidden_state
    return float(classifier.score(hidden)[0, -1, 0])


@pytest.fixture(scope="session")
def two(make_sample):
    """Prompts "ab" and "a", responses "cd" and "", ended by <eos>, with labels and two columns."""
    first = {"question": "ab", "answer": "4"}
    second = {"question": "a", "answer": "5"}
    return [
        make_sample([4, 5], [6, 7, 1], text="ab", label=1, row=first),
        make_sample([4], [1], text="a", label={"answer": 2}, row=second),
    ]


@pytest.fixture
def game():
    """Prompt "ab", action "cd", environment "ef", action "czd" and <eos>; z separates steps."""
    ids = [4, 5, 6, 7, 8, 9, 6, 29, 7, 1]
    mask = [False, False, True, True, False, False, True, True, True, True]
    prompt = Prompt("ab", [4, 5], label="cd\nczd")
    return one_segment(
        ids,
        mask,
        log_probs=[0.0] * 10,
        versions=[0] * 10,
        finish_reason=FinishReason.STOP,
        prompt=prompt,
        group=0,
    )


@pytest.fixture
def cut_game(game, make_sample):
    """``game`` after an earlier segment of its sample, a response of two steps to another prompt."""
    earlier = make_sample([9], [10, 29, 11, 1]).last
    return dataclasses.replace(game, segments=[earlier, *game.segments])


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "e"}'}}


@pytest.fixture
def episode(game):
    """``game`` as an agent's: the prompt is a chat that has an answer, "cd" calls a tool, whose result is "ef"."""
    asked = [{"role": "assistant", "content": "h"}, {"role": "user", "content": "ab"}]
    called = {"role": "assistant", "content": "cd", "tool_calls": [CALL]}
    after = [{"role": "tool", "content": "ef"}, {"role": "assistant", "content": "czd"}]
    played = Episode([*asked, called, *after], Ending.COMPLETED, n_turns=2)
    prompt = dataclasses.replace(game.prompt, messages=asked, label="czd")
    return dataclasses.replace(game, prompt=prompt, episode=played)
