"""Sources of rewards see the spans that the policy wrote; what tools and environments wrote is not its own."""

import pytest
import torch

from openppo.config import RewardConfig
from openppo.models.padding import MicroBatchSize
from openppo.rewards import FunctionScorer, RewardFunction, VerifiableScorer
from openppo.rewards.model import ProcessScorer, RewardModelText, policy_tokens
from openppo.rewards.verifiable import length_reward
from openppo.types import FinishReason, Prompt, SingleProcess, Trajectory


@pytest.fixture
def game():
    """Prompt "ab", action "cd", environment "ef", action "czd" and <eos>; z separates steps."""
    ids = [4, 5, 6, 7, 8, 9, 6, 29, 7, 1]
    mask = [False, False, True, True, False, False, True, True, True, True]
    return Trajectory(
        ids, mask, [0.0] * 10, [0] * 10, FinishReason.STOP, Prompt("ab", [4, 5], label="cd\nczd"), group=0
    )


def test_a_function_reads_and_rewards_the_actions(game, make_tokenizer):
    seen = []
    for rewards, expected in (
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 0, 0, 3, 4, 5, 6]),
        ([1, 2, 3], [0, 0, 0, 1, 0, 0, 2, 0, 3, 0]),  # a step ends with its turn: "cd", "c" and "d"
    ):

        def reward_fn(response, token_ids, query, rewards=rewards):
            seen.append((response, token_ids, query))
            return rewards

        function = RewardFunction(reward_fn, "f.py", ())
        (score,) = FunctionScorer(function, make_tokenizer(), step_separator="z").score([game])
        assert score.token_rewards == expected
    assert score.step_ends == [reward > 0 for reward in expected]
    assert seen == [("cd\nczd", [6, 7, 6, 29, 7, 1], "abcdefczd<eos>")] * 2


def test_a_process_reward_model_judges_the_actions_steps(game, make_tokenizer):
    rendered = []
    scorer = ProcessScorer(
        model=lambda sequences, places: torch.zeros(3, 30),
        render=lambda _, steps: rendered.append(steps) or ([1] * 9, [2, 5, 8]),
        policy=make_tokenizer(),
        reward_ids=(20, 21),
        options=RewardConfig(step_separator="z"),
        where="m",
        context=None,
        pad_token_id=0,
        size=MicroBatchSize(2),
        comm=SingleProcess(),
        device=torch.device("cpu"),
    )
    [score] = scorer.score([game])
    assert score.token_rewards == [0, 0, 0, 0.5, 0, 0, 0.5, 0, 0.5, 0]
    assert rendered == [["cd", "zc", "zd"]]


def test_verifiers_count_and_read_the_actions(game, make_tokenizer):
    (score,) = VerifiableScorer(length_reward(6), make_tokenizer()).score([game])
    assert score.rewards == {"reward": 1.0}
    (score,) = VerifiableScorer(lambda response, t: float(response == t.prompt.label), make_tokenizer()).score([game])
    assert score.rewards == {"reward": 1.0}


def test_reward_models_read_the_whole_episode(game, make_tokenizer):
    assert policy_tokens(make_tokenizer(), game) == game.token_ids
    assert RewardModelText(make_tokenizer(), make_tokenizer(), "m")(game) == game.token_ids
