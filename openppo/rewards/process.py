"""Scores from a process reward model in the same process: one for each step of a response."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import RewardConfig
from openppo.models.batching import MicroBatchSize, equal_batches
from openppo.models.padding import pad_right
from openppo.rewards.model import Model, last_tokens
from openppo.rewards.scoring import (
    check_number,
    refuse_images,
    score_of_steps,
    span_texts,
    step_tokens,
)
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Prompt, Score, Trajectory

Render = Callable[[Prompt, list[str]], tuple[list[int], list[int]]]
"""Token ids of a prompt and the steps after it, and where in them the placeholder of each step is."""
_AGGREGATES: dict[str, Any] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}


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

    @timed("reward_model")
    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        refuse_images(str(self), trajectories)
        rows = [self.read(trajectory) for trajectory in trajectories]
        good: dict[int, list[float]] = {}
        batches = equal_batches([len(row.token_ids) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "judging steps", enabled=self.comm.rank == 0):
            good.update(zip(batch, self._forward([rows[i] for i in batch]), strict=True))
        return [self._score(t, rows[i], good.get(i, [])) for i, t in enumerate(trajectories)]

    def read(self, trajectory: Trajectory) -> JudgedSteps:
        """Steps as the model reads them; no tokens for a response without steps."""
        separator, texts = self.options.step_separator, span_texts(trajectory, self.policy)
        pieces = [
            piece.rstrip() for text in texts for piece in text.split(separator) if piece.strip()
        ]
        if not pieces:
            return JudgedSteps([], [], [])
        ends = step_tokens(trajectory, self.policy, separator)
        ids, places = self.render(
            trajectory.prompt, [pieces[0], *(separator + piece for piece in pieces[1:])]
        )
        read = last_tokens(ids, self.context, self.where, trajectory=trajectory)
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
            return Score(
                {self.name: _AGGREGATES[self.options.prm_aggregate](good) if good else 0.0}
            )
        weight = self.options.weights().get(self.name, 1.0)
        return score_of_steps(trajectory, steps.ends, [weight * p for p in good])
