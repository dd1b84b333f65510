"""The training loops. Names load on first use."""

import os
from typing import TYPE_CHECKING

import torch

from openppo.lazy import lazy_names

# Before any name loads DeepSpeed, whose search for devices is slow and loud.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

if TYPE_CHECKING:
    from openppo.build.ppo import build_ppo_trainer as build_ppo_trainer
    from openppo.trainer.ppo import PPOTrainer as PPOTrainer
    from openppo.trainer.quiet import quiet_libraries as quiet_libraries
    from openppo.trainer.supervised.trainers import ProcessRewardTrainer as ProcessRewardTrainer
    from openppo.trainer.supervised.trainers import RewardModelTrainer as RewardModelTrainer
    from openppo.trainer.supervised.trainers import SFTTrainer as SFTTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__)
