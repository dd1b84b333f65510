"""Every estimator learns from every kind of reward under every normalization, on games that are tables."""

import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.experience.estimators import ESTIMATORS
from tests.learning.tabular import Choose, Form, Game, Move, Rewards, Rollouts, train

N_STEPS = 12
"""Global steps, each of 64 samples in two optimizer steps."""
SIZES = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "micro_rollout_batch_size": 64}
SIZES |= {"train_batch_size": 32, "micro_train_batch_size": 32}
MODELS = {
    "pretrain": "m",
    "prompt_data": "d",
    "reward_fn": "f.py",
    "init_kl_coef": 0.0,
    "generate_max_len": 4,
}
NORMALIZERS: dict[str, dict[str, Any]] = {
    "none": {},
    "group": {"normalize_reward": "group"},
    "running": {"normalize_reward": "running"},
}
REFUSED = [("group_norm", "group"), ("remax", "group")]
"""Estimators that compare by themselves, beside a normalizer that does."""


@dataclass(frozen=True)
class Bandit:
    """One turn: at each of two prompts another one of three arms pays 1, and the others nothing."""

    n_tokens: int = 5
    n_actions: int = 3
    right: dict[int, int] = field(default_factory=lambda: {3: 0, 4: 1})

    def play(self, prompt: int, choose: Choose) -> tuple[list[Move], float]:
        action = choose(prompt)
        return [Move(prompt, action)], float(action == self.right[prompt])


@dataclass(frozen=True)
class GoOn:
    """End now for 0.5 (action 0), or go on for two more turns, whatever they say, for 1 (action 1)."""

    n_tokens: int = 5
    n_actions: int = 2
    right: dict[int, int] = field(default_factory=lambda: {2: 1})

    def play(self, prompt: int, choose: Choose) -> tuple[list[Move], float]:
        first = Move(prompt, choose(prompt))
        if first.action == 0:
            return [first], 0.5
        return [first, *[Move(state, choose(state)) for state in (3, 4)]], 1.0


@dataclass(frozen=True)
class GoOnInOneResponse:
    """The same in a response of one or three steps, of which each reads the one before."""

    n_tokens: int = 3
    n_actions: int = 2
    right: dict[int, int] = field(default_factory=lambda: {2: 1})

    def play(self, prompt: int, choose: Choose) -> tuple[list[Move], float]:
        first = Move(prompt, choose(prompt))
        if first.action == 0:
            return [first], 0.5
        second = Move(first.action, choose(first.action))
        third = Move(second.action, choose(second.action))
        return [first, second, third], 1.0


GAMES: dict[str, Game] = {"bandit": Bandit(), "go_on": GoOn()}


def config_of(estimator: str, normalizer: str) -> TrainPPOConfig:
    return from_options(
        TrainPPOConfig, advantage_estimator=estimator, **MODELS, **SIZES, **NORMALIZERS[normalizer]
    )


def chance(
    estimator: str,
    normalizer: str,
    rewards: Rewards,
    game: Game,
    form: Form = "episode",
    n_steps: int = N_STEPS,
) -> float:
    """Chance of the right action after training."""
    config = config_of(estimator, normalizer)
    config.validate()
    right = train(config, Rollouts(game, rewards, form, random.Random(1)), n_steps)
    print(f"p(right) {right:.4f}")
    return right


CELLS = [cell for cell in product(ESTIMATORS, NORMALIZERS) if cell not in REFUSED]
BY_STEP = [cell for cell in CELLS if cell[0] != "group_norm"]


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("rewards", ["score", "turns", "both"])
@pytest.mark.parametrize(("estimator", "normalizer"), CELLS)
def test_every_cell_learns_the_action_that_pays_most(
    estimator: str, normalizer: str, rewards: Rewards, game: str
) -> None:
    assert chance(estimator, normalizer, rewards, GAMES[game]) >= 0.95


@pytest.mark.parametrize("rewards", ["turns", "both"])
@pytest.mark.parametrize(("estimator", "normalizer"), CELLS)
def test_episodes_in_segments_learn_to_go_on(
    estimator: str, normalizer: str, rewards: Rewards
) -> None:
    assert chance(estimator, normalizer, rewards, GAMES["go_on"], "segments") >= 0.95


@pytest.mark.parametrize("rewards", ["turns", "both"])
@pytest.mark.parametrize(("estimator", "normalizer"), BY_STEP)
def test_single_responses_scored_by_step_learn_to_go_on(
    estimator: str, normalizer: str, rewards: Rewards
) -> None:
    assert chance(estimator, normalizer, rewards, GoOnInOneResponse(), "response") >= 0.95


# docs/algorithms/group_norm.md states it: each step is compared with the mean step.
def test_process_supervision_prefers_a_high_mean_of_steps() -> None:
    assert (
        chance("group_norm", "none", "turns", GoOnInOneResponse(), "response", n_steps=40) <= 0.001
    )


@pytest.mark.parametrize(("estimator", "normalizer"), REFUSED)
def test_a_normalizer_beside_its_own_comparison_is_refused(estimator: str, normalizer: str) -> None:
    with pytest.raises(ValueError, match=f"--advantage_estimator {estimator}"):
        config_of(estimator, normalizer).validate()
