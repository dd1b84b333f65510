"""Scores from a reward model in the same process: of a whole response, or of each of its steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import RewardConfig
from openppo.models.padding import MicroBatchSize, micro_batches, pad_right
from openppo.rewards.rendering import last_tokens
from openppo.rewards.scoring import check_number, check_scores, score_of_steps, span_texts, step_tokens
from openppo.tracking import progress_bar
from openppo.types import Comm, Prompt, Score, Trajectory

Model = Callable[[Tensor, Tensor], Tensor]


@dataclass
class ModelScorer:
    """Scores from a reward model: (output - ``mean``) / ``std`` at the last token of what ``encode`` gives.

    ``encode`` makes the token ids that the model reads, by default those of the policy. ``size`` is that of a forward.
    """

    model: Model
    size: MicroBatchSize
    pad_token_id: int
    comm: Comm
    device: torch.device
    name: str = "reward"
    encode: Callable[[Trajectory], list[int]] = attrgetter("token_ids")
    mean: float = 0.0
    std: float = 1.0
    collective = True

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
        return [Score({self.name: (score - self.mean) / self.std}) for score in scores]


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


def stored_normalization(config: PreTrainedConfig, source: str, remedy: str) -> tuple[float, float]:
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
    return mean, std


Render = Callable[[Prompt, list[str]], tuple[list[int], list[int]]]
"""Token ids of a prompt and the steps after it, and where in them the placeholder of each step is."""
AGGREGATES: Mapping[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}
"""Names of ``--prm_aggregate`` that make one number of all steps."""


class JudgedSteps(NamedTuple):
    """Steps of a trajectory as a process reward model reads them."""

    token_ids: list[int]  # the model's own
    places: list[int]  # of the placeholders in them, one for each step
    ends: list[int]  # index in the trajectory of each step's last token


@dataclass
class ProcessScorer:
    """Scores from ``model``, which maps sequences and places, both (B, L), to logits (N, V) at the N places.

    Steps are what ``--step_separator`` divides the response into, blank ones left out; ``render`` writes them for the
    model, with a placeholder after each. Of more than ``context`` tokens the last are kept, and steps before them are
    not judged. A step is worth p(good), the softmax over ``reward_ids`` (good, bad) at its placeholder. With
    ``--prm_aggregate steps`` that is the reward of its last token, times the weight of ``name``; else all steps of a
    response make one reward ``name``, which is 0 for a response without steps. ``where`` is the model's flag and name,
    for messages, ``policy`` the tokenizer of the trajectories.
    """

    model: Model
    render: Render
    policy: PreTrainedTokenizerBase
    reward_ids: tuple[int, int]
    options: RewardConfig
    where: str
    context: int | None
    pad_token_id: int
    size: MicroBatchSize
    comm: Comm
    device: torch.device
    name: str = "prm"
    collective = True

    def __str__(self) -> str:
        return self.where

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        rows = [self.read(trajectory) for trajectory in trajectories]
        good: dict[int, list[float]] = {}
        batches = equal_batches([len(row.token_ids) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "judging steps", enabled=self.comm.rank == 0):
            good.update(zip(batch, self._forward([rows[i] for i in batch]), strict=True))
        return [self._score(t, rows[i], good.get(i, [])) for i, t in enumerate(trajectories)]

    def read(self, trajectory: Trajectory) -> JudgedSteps:
        """Steps as the model reads them; no tokens for a response without steps."""
        separator, texts = self.options.step_separator, span_texts(trajectory, self.policy)
        pieces = [piece.rstrip() for text in texts for piece in text.split(separator) if piece.strip()]
        if not pieces:
            return JudgedSteps([], [], [])
        ends = step_tokens(trajectory, self.policy, separator)
        ids, places = self.render(trajectory.prompt, [pieces[0], *(separator + piece for piece in pieces[1:])])
        read = last_tokens(ids, self.context, self.where, trajectory)
        places = [place - (len(ids) - len(read)) for place in places]
        n_cut = sum(place < 0 for place in places)
        return JudgedSteps(read, places[n_cut:], ends[n_cut:])

    @torch.no_grad()
    def _forward(self, rows: Sequence[JudgedSteps]) -> list[list[float]]:
        """p(good) of the steps of each row; without rows the model runs all the same."""
        pad = self.pad_token_id
        sequences, _ = pad_right([row.token_ids for row in rows] or [[pad] * 2], pad)
        places = torch.zeros(sequences.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            places[i, row.places] = True
        logits: Tensor = self.model(sequences.to(self.device), places.to(self.device))  # (N, V)
        good = logits[:, list(self.reward_ids)].float().softmax(-1)[:, 0].cpu()  # (N,)
        return [part.tolist() for part in good.split([len(row.places) for row in rows])]

    def _score(self, trajectory: Trajectory, steps: JudgedSteps, good: list[float]) -> Score:
        good = [check_number(p, trajectory, str(self)) for p in good]
        if self.options.prm_aggregate != "steps":
            return Score({self.name: AGGREGATES[self.options.prm_aggregate](good) if good else 0.0})
        weight = self.options.weights().get(self.name, 1.0)
        return score_of_steps(trajectory, steps.ends, [weight * p for p in good])
