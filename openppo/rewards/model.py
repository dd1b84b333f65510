"""Scores from a reward model in process."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from openppo.models.padding import MicroBatchSize, micro_batches, pad_right
from openppo.rewards.scoring import check_scores
from openppo.tracking import progress_bar
from openppo.types import Comm, Score, Trajectory

Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Normalization:
    """``(score - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, scores: Sequence[float]) -> list[float]:
        return [(score - self.mean) / self.std for score in scores]


class ModelScorer:
    """Scores from a reward model: its output at the last token of what ``encode`` makes of a trajectory.

    ``encode`` gives the token ids that the model reads (``policy_tokens``: those of the policy). ``size`` is
    that of a forward.
    """

    collective = True

    def __init__(
        self,
        model: Model,
        size: MicroBatchSize,
        pad_token_id: int,
        comm: Comm,
        device: torch.device,
        name: str = "reward",
        encode: Callable[[Trajectory], list[int]] | None = None,
        normalization: Normalization = Normalization(),
    ) -> None:
        self.model = model
        self.size = size
        self.pad_token_id = pad_token_id
        self.comm = comm
        self.device = device
        self.name = name
        self.encode = encode or policy_tokens
        self.normalization = normalization

    def __str__(self) -> str:
        return "the reward model"

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        rows = [self.encode(trajectory) for trajectory in trajectories]
        outputs: dict[int, float] = {}
        batches = equal_batches([len(row) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "scoring", enabled=self.comm.rank == 0):
            ids = [rows[i] for i in batch] or [[self.pad_token_id] * 2]
            outputs.update(zip(batch, forward_scores(self.model, ids, self.pad_token_id, self.device), strict=False))
        scores = check_scores([outputs[i] for i in range(len(rows))], trajectories, str(self))
        return [Score({self.name: score}) for score in self.normalization(scores)]


def equal_batches(lengths: Sequence[int], size: MicroBatchSize, comm: Comm) -> list[list[int]]:
    """Indexes of rows in ``micro_batches``, the longest first; rows of length 0 are in none.

    As many batches as the rank with the most has, as partitioned weights demand: the last may be empty. Collective.
    """
    real = [i for i in range(len(lengths)) if lengths[i] > 0]
    batches = [[real[k] for k in batch] for batch in micro_batches([lengths[i] for i in real], size)]
    n_batches = int(comm.all_reduce(torch.tensor(len(batches)), "max"))
    return batches + [[] for _ in range(n_batches - len(batches))]


@torch.no_grad()
def forward_scores(model: Model, rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> list[float]:
    """The reward model's scores of ``rows`` of token ids, in one forward."""
    sequences, attention_mask = pad_right(rows, pad_token_id)
    return model(sequences.to(device), attention_mask.to(device)).tolist()


def policy_tokens(trajectory: Trajectory) -> list[int]:
    """The trajectory as the policy wrote it."""
    return trajectory.token_ids


def stored_normalization(config: PreTrainedConfig, source: str, remedy: str) -> Normalization:
    """Mean and std of a reward model's scores, which its config.json holds as ``mean`` and ``std`` as in OpenRLHF.

    ``ValueError`` naming ``--normalize_reward`` and ``source``, and ending with ``remedy``, if there are none.
    """
    stored: Any = config.to_dict()
    mean, std = stored.get("mean"), stored.get("std")
    numbers = isinstance(mean, int | float) and isinstance(std, int | float)
    if not (numbers and math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(
            f"--normalize_reward: {source} stores no mean and positive std of its scores in its config.json (found "
            f"{mean!r} and {std!r}). {remedy}"
        )
    return Normalization(mean, std)
