"""Check of an errand: the option ``--length_reward`` adds to the score of a response for each of its tokens."""

import subprocess
import sys

import torch

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.experience.token_rewards import shape_scores

WORDS = "--pretrain m --prompt_data d --reward_fn r.py --length_reward 0.5".split()

config = parse_options(TrainPPOConfig, WORDS)
scores = shape_scores(
    torch.tensor([1.0, 1.0]),
    torch.tensor([False, False]),
    torch.tensor([2.0, 4.0]),
    config=config.shaping,
    max_len=8,
)
assert scores.tolist() == [2.0, 3.0], scores
assert parse_options(TrainPPOConfig, WORDS[:-2]).shaping.length_reward == 0.0

help_page = subprocess.run(
    [sys.executable, "-m", "openppo.cli.train_ppo", "--help", "all"], capture_output=True, text=True
)
assert "--length_reward" in help_page.stdout, help_page
