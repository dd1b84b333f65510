"""Sources of rewards see the spans that the policy wrote; what tools and environments wrote is not its own."""

import pytest

from openppo.rewards import FunctionScorer, VerifiableScorer, as_reward_function
from openppo.rewards.process import StepText
from openppo.rewards.rendering import PolicyTokens, RewardModelText
from openppo.rewards.verifiable import LengthReward
from openppo.types import FinishReason, Prompt, Trajectory


@pytest.fixture
def game():
    """Prompt "ab", action "cd", environment "ef", action "czd" and <eos>; z separates steps."""
    ids = [4, 5, 6, 7, 8, 9, 6, 29, 7, 1]
    mask = [False, False, True, True, False, False, True, True, True, True]
    return Trajectory(
        ids, mask, [0.0] * 10, [0] * 10, FinishReason.STOP, Prompt("ab", [4, 5], label="cd\nczd"), group=0
    )


@pytest.fixture
def scorer_of(make_tokenizer):
    def make(function):
        return FunctionScorer(as_reward_function(function, "f.py", ()), make_tokenizer(), step_separator="z")

    return make


def test_a_function_gets_texts_and_ids_of_the_actions(game, scorer_of):
    seen = []
    scorer_of(lambda response, token_ids, query: seen.append((response, token_ids, query)) or 0.0).score([game])
    assert seen == [("cd\nczd", [6, 7, 6, 29, 7, 1], "abcdefczd<eos>")]


def test_numbers_of_tokens_go_to_the_actions(game, scorer_of):
    (score,) = scorer_of(lambda response: [1, 2, 3, 4, 5, 6]).score([game])
    assert score.token_rewards == [0, 0, 1, 2, 0, 0, 3, 4, 5, 6]


def test_a_step_ends_with_its_turn(game, scorer_of):
    (score,) = scorer_of(lambda response: [1, 2, 3]).score([game])  # "cd", "c" and "d"
    assert score.token_rewards == [0, 0, 0, 1, 0, 0, 2, 0, 3, 0]
    assert score.step_ends == [reward > 0 for reward in score.token_rewards]


def test_a_process_reward_model_judges_the_actions_steps(game, make_tokenizer):
    rendered = []
    text = StepText(
        make_tokenizer(), make_tokenizer(), lambda _, steps: rendered.append(steps) or ([1] * 9, [2, 5, 8]), "z", "m"
    )
    assert text(game).ends == [3, 6, 8]
    assert rendered == [["cd", "zc", "zd"]]


def test_verifiers_count_and_read_the_actions(game, make_tokenizer):
    (score,) = VerifiableScorer(LengthReward(6), make_tokenizer()).score([game])
    assert score.rewards == {"reward": 1.0}
    (score,) = VerifiableScorer(lambda response, t: float(response == t.prompt.label), make_tokenizer()).score([game])
    assert score.rewards == {"reward": 1.0}


def test_reward_models_read_the_whole_episode(game, make_tokenizer):
    assert PolicyTokens(make_tokenizer(), "m")(game) == game.token_ids
    assert RewardModelText(make_tokenizer(), make_tokenizer(), "m")(game) == game.token_ids


@pytest.mark.parametrize(("reason", "ends"), [("stop", True), ("tool_call", True), ("length", False), ("abort", False)])
def test_only_a_response_that_the_policy_ended_ends_with_eos(game, make_tokenizer, reason, ends):
    game.token_ids[-1], game.finish_reason = 9, FinishReason(reason)
    assert (RewardModelText(make_tokenizer(), make_tokenizer(), "m")(game)[-1] == 1) == ends
