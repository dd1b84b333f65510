"""What the participants of ``benchmarks/learning.py`` share: tasks, options, the curve, and rewards of token ids.

Runs in every participant's environment. A participant trains one policy, prints a JSON line after every rollout that
it has trained on, and leaves the policy in ``RUN_FOLDER``.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP, BETA = 8, 0.04  # of GRPO: responses to a prompt, and the coefficient of the KL in the loss
ADAM_BETAS, WARM_UP, LEAST_RATE = (
    (0.9, 0.95),
    0.03,
    0.1,
)  # which OpenRLHF has; the last is a share of the peak
NO_CLIP = 1e6  # a range of rewards that clips none
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # reward_sentiment


@dataclass(frozen=True)
class Task:
    """Hyperparameters that all libraries share. ``samples`` are those of one rollout."""

    rollouts: int
    samples: int
    mini_batch: int
    epochs: int
    new_tokens: int
    kl: float
    lambd: float
    value_clip: float
    actor_rate: float
    critic_rate: float

    @property
    def optimizer_steps(self) -> int:
        """Of each rollout."""
        return self.epochs * self.samples // self.mini_batch


TASKS = {  # after examples/scripts/quickstart.sh and stories.sh
    "sort": Task(96, 256, 128, 2, 16, 0.4, 0.95, 5.0, 3e-4, 1e-3),
    "stories": Task(24, 128, 64, 1, 96, 0.02, 1.0, 0.2, 5e-4, 1e-3),
}


def options(description: str | None) -> argparse.Namespace:
    """What every participant is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--assets", type=Path, required=True, help="the folder that learning.py prepared"
    )
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--algorithm", choices=["ppo", "grpo"], default="ppo")
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    arguments.folder = arguments.assets / arguments.task
    arguments.save_path = os.environ["RUN_FOLDER"] + "/policy"
    return arguments


class Curve:
    """Rewards on stdout, by samples and by seconds since ``start``. What libraries print goes to stderr."""

    def __init__(self, task: Task) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._samples_of_a_step, self._samples, self._began = task.samples, 0, 0.0

    def start(self) -> None:
        """Everything is loaded."""
        self._began = time.perf_counter()

    def step(self, reward: float) -> None:
        """A rollout of this mean reward was trained on."""
        self._samples += self._samples_of_a_step
        line = {
            "samples": self._samples,
            "seconds": time.perf_counter() - self._began,
            "reward": reward,
        }
        self._answers.write(json.dumps(line) + "\n")


def prompts(file: Path, n: int) -> list[dict[str, Any]]:
    """Its first ``n`` rows."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= n, (len(lines), n)
    return [json.loads(line) for line in lines[:n]]


def scores(model: Any, sequences: Sequence[Sequence[int]]) -> list[float]:
    """What a reward model says at the last token of each sequence."""
    import torch

    longest = max(map(len, sequences))
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])  # (B, L)
    last = torch.tensor([len(ids) - 1 for ids in sequences])
    with torch.no_grad():
        hidden = model.model(
            ids, attention_mask=torch.arange(longest) <= last[:, None]
        ).last_hidden_state
        return model.score(hidden)[torch.arange(len(last)), last, 0].tolist()
