"""From trajectories to experience: token rewards, advantages, the maker and the replay buffer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.experience.advantages import (
        get_advantages_and_returns,
        get_cumulative_returns,
        length_adaptive_lambda,
    )
    from openppo.experience.estimators import ESTIMATORS, Estimator
    from openppo.experience.kl_controller import AdaptiveKLController, FixedKLController
    from openppo.experience.maker import ExperienceMaker
    from openppo.experience.replay_buffer import ReplayBuffer
    from openppo.experience.token_rewards import compute_reward

_HOME = {
    "AdaptiveKLController": "kl_controller",
    "ESTIMATORS": "estimators",
    "Estimator": "estimators",
    "ExperienceMaker": "maker",
    "FixedKLController": "kl_controller",
    "ReplayBuffer": "replay_buffer",
    "compute_reward": "token_rewards",
    "get_advantages_and_returns": "advantages",
    "get_cumulative_returns": "advantages",
    "length_adaptive_lambda": "advantages",
}

__all__ = [
    "ESTIMATORS",
    "AdaptiveKLController",
    "Estimator",
    "ExperienceMaker",
    "FixedKLController",
    "ReplayBuffer",
    "compute_reward",
    "get_advantages_and_returns",
    "get_cumulative_returns",
    "length_adaptive_lambda",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
