"""Scores from a process reward model: how probable it is that each step of a response is good."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import RewardConfig
from openppo.models.padding import MicroBatchSize, pad_right
from openppo.models.pretrained import pad_token_id
from openppo.rewards.model import equal_batches
from openppo.rewards.scoring import check_number, name_sample, span_texts
from openppo.rewards.steps import score_of_steps, step_tokens
from openppo.tracking import progress_bar
from openppo.types import Comm, Prompt, Score, Trajectory

logger = logging.getLogger("openppo")

Render = Callable[[Prompt, list[str]], tuple[list[int], list[int]]]
"""Token ids of a prompt and the steps after it, and where in them the placeholder of each step is."""
AGGREGATES: Mapping[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}
"""Names of ``--prm_aggregate`` that make one number of all steps."""


@dataclass(frozen=True)
class JudgedSteps:
    """Steps of a trajectory as a process reward model reads them.

    ``token_ids`` are the model's own, ``places`` the indexes of the placeholders in them, one for each step, and
    ``ends`` the index of each step's last token in the trajectory.
    """

    token_ids: list[int]
    places: list[int]
    ends: list[int]


@dataclass(frozen=True)
class StepText:
    """Trajectories as token ids of the process reward model, with its placeholder after each step.

    Steps are what ``separator`` divides the response into, blank ones left out. Of more than ``context`` tokens the
    last are kept, and steps before them are not judged. ``source`` is the flag and name of the model, for messages.
    """

    policy: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    render: Render
    separator: str
    source: str
    context: int | None = None

    def __call__(self, trajectory: Trajectory) -> JudgedSteps:
        """Steps as the model reads them; no tokens for a response without steps."""
        texts = span_texts(trajectory, self.policy)
        pieces = [piece.rstrip() for text in texts for piece in text.split(self.separator) if piece.strip()]
        if not pieces:
            return JudgedSteps([], [], [])
        ends = step_tokens(trajectory, self.policy, self.separator)
        ids, places = self.render(trajectory.prompt, [pieces[0], *(self.separator + piece for piece in pieces[1:])])
        assert len(ends) == len(places), f"{len(ends)} steps, {len(places)} placeholders"
        cut = 0 if self.context is None else max(0, len(ids) - self.context)
        if cut > 0:
            logger.warning(
                "%s reads %d tokens, but %s has %d of its tokens: the first are left out",
                *(self.source, self.context, name_sample(trajectory), len(ids)),
            )
        kept = [(place - cut, end) for place, end in zip(places, ends, strict=True) if place >= cut]
        return JudgedSteps(ids[cut:], [place for place, _ in kept], [end for _, end in kept])


class ProcessScorer:
    """Scores from ``model``, which maps sequences and places, both (B, L), to logits (N, V) at the N places.

    A step is worth p(good), the softmax over ``reward_ids`` (good, bad) at its placeholder. With ``--prm_aggregate
    steps`` that is the reward of its last token, times the weight of ``name``; else all steps of a response make one
    reward ``name``, which is 0 for a response without steps.
    """

    collective = True

    def __init__(
        self,
        model: Callable[[Tensor, Tensor], Tensor],
        text: StepText,
        reward_ids: tuple[int, int],
        source: RewardConfig,
        size: MicroBatchSize,
        comm: Comm,
        device: torch.device,
        name: str = "prm",
    ) -> None:
        self.model = model
        self.text = text
        self.reward_ids = list(reward_ids)
        self.aggregate = source.prm_aggregate
        self.token_weight = source.weights().get(name, 1.0)
        self.size = size
        self.comm = comm
        self.device = device
        self.name = name

    def __str__(self) -> str:
        return self.text.source

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        rows = [self.text(trajectory) for trajectory in trajectories]
        good: dict[int, list[float]] = {}
        batches = equal_batches([len(row.token_ids) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "judging steps", enabled=self.comm.rank == 0):
            good.update(zip(batch, self._forward([rows[i] for i in batch]), strict=True))
        return [self._score(t, rows[i], good.get(i, [])) for i, t in enumerate(trajectories)]

    @torch.no_grad()
    def _forward(self, rows: Sequence[JudgedSteps]) -> list[list[float]]:
        """p(good) of the steps of each row; without rows the model runs all the same."""
        pad = pad_token_id(self.text.own)
        sequences, _ = pad_right([row.token_ids for row in rows] or [[pad] * 2], pad)
        places = torch.zeros(sequences.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            places[i, row.places] = True
        logits = self.model(sequences.to(self.device), places.to(self.device))  # (N, V)
        good = logits[:, self.reward_ids].float().softmax(-1)[:, 0].cpu()  # (N,)
        return [part.tolist() for part in good.split([len(row.places) for row in rows])]

    def _score(self, trajectory: Trajectory, steps: JudgedSteps, good: list[float]) -> Score:
        good = [check_number(p, trajectory, str(self)) for p in good]
        if self.aggregate != "steps":
            return Score({self.name: AGGREGATES[self.aggregate](good) if good else 0.0})
        weighted = [self.token_weight * p for p in good]
        return score_of_steps(trajectory, steps.ends, weighted)
