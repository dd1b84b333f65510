"""The training loops. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.trainer.build import build_ppo_trainer
    from openppo.trainer.ppo import PPOTrainer
    from openppo.trainer.startup import quiet_libraries
    from openppo.trainer.supervised.process_reward import ProcessRewardTrainer
    from openppo.trainer.supervised.reward_model import RewardModelTrainer
    from openppo.trainer.supervised.sft import SFTTrainer

_HOME = {
    "PPOTrainer": "ppo",
    "ProcessRewardTrainer": "supervised.process_reward",
    "RewardModelTrainer": "supervised.reward_model",
    "SFTTrainer": "supervised.sft",
    "build_ppo_trainer": "build",
    "quiet_libraries": "startup",
}

__all__ = [
    "PPOTrainer",
    "ProcessRewardTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "build_ppo_trainer",
    "quiet_libraries",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
