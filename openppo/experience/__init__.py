"""From trajectories to experience: token rewards, advantages, the maker and the replay buffer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.experience.advantages import get_advantages_and_returns, get_cumulative_returns
    from openppo.experience.kl_controller import FixedKLController
    from openppo.experience.maker import ExperienceMaker
    from openppo.experience.replay_buffer import ReplayBuffer
    from openppo.experience.token_rewards import compute_reward

_HOME = {
    "ExperienceMaker": "maker",
    "FixedKLController": "kl_controller",
    "ReplayBuffer": "replay_buffer",
    "compute_reward": "token_rewards",
    "get_advantages_and_returns": "advantages",
    "get_cumulative_returns": "advantages",
}

__all__ = [
    "ExperienceMaker",
    "FixedKLController",
    "ReplayBuffer",
    "compute_reward",
    "get_advantages_and_returns",
    "get_cumulative_returns",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
