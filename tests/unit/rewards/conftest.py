"""Trajectories in one call; only their tokens, texts and labels matter to rewards."""

import dataclasses

import pytest
import torch

from openppo.types import Ending, Episode, FinishReason, Prompt, Trajectory


@pytest.fixture(scope="session")
def make_trajectory():
    """``make_trajectory(prompt_ids, response_ids, text=, label=, row=, messages=, truncated=)``."""

    def make(prompt_ids, response_ids, text="ask", truncated=False, **prompt):
        n_prompt, n_response = len(prompt_ids), len(response_ids)
        return Trajectory(
            token_ids=prompt_ids + response_ids,
            action_mask=[False] * n_prompt + [True] * n_response,
            log_probs=[0.0] * (n_prompt + n_response),
            versions=[0] * (n_prompt + n_response),
            finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
            prompt=Prompt(text, prompt_ids, **prompt),
            group=0,
        )

    return make


@torch.no_grad()
def score_by_transformers(classifier, ids):
    """The score of one row alone, without padding: the head at the last token."""
    hidden = classifier.model(torch.tensor([ids])).last_hidden_state
    return float(classifier.score(hidden)[0, -1, 0])


@pytest.fixture(scope="session")
def two(make_trajectory):
    """Prompts "ab" and "a", responses "cd" and "", ended by <eos>, with labels and two columns."""
    first = {"question": "ab", "answer": "4"}
    second = {"question": "a", "answer": "5"}
    return [
        make_trajectory([4, 5], [6, 7, 1], text="ab", label=1, row=first),
        make_trajectory([4], [1], text="a", label={"answer": 2}, row=second),
    ]


@pytest.fixture
def game():
    """Prompt "ab", action "cd", environment "ef", action "czd" and <eos>; z separates steps."""
    ids = [4, 5, 6, 7, 8, 9, 6, 29, 7, 1]
    mask = [False, False, True, True, False, False, True, True, True, True]
    prompt = Prompt("ab", [4, 5], label="cd\nczd")
    return Trajectory(ids, mask, [0.0] * 10, [0] * 10, FinishReason.STOP, prompt, group=0)


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "e"}'}}


@pytest.fixture
def episode(game):
    """``game`` as an agent's: the prompt is a chat that has an answer, "cd" calls a tool, whose result is "ef"."""
    asked = [{"role": "assistant", "content": "h"}, {"role": "user", "content": "ab"}]
    called = {"role": "assistant", "content": "cd", "tool_calls": [CALL]}
    rest = [{"role": "tool", "content": "ef"}, {"role": "assistant", "content": "czd"}]
    played = Episode([*asked, called, *rest], Ending.COMPLETED, n_turns=2)
    prompt = dataclasses.replace(game.prompt, messages=asked, label="czd")
    return dataclasses.replace(game, prompt=prompt, episode=played)
