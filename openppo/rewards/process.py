"""Scores from a process reward model in the same process: one for each step of a response."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import RewardConfig, RowsConfig
from openppo.datasets import StepEncoder, single_token_id
from openppo.datasets.process import STEP_SEPARATOR
from openppo.datasets.templates import text_of
from openppo.model_inputs import ModelInputs
from openppo.models.batching import MicroBatchSize
from openppo.models.equal_batches import equal_batches
from openppo.models.pretrained import check_token_ids
from openppo.rewards.model import last_tokens
from openppo.rewards.scoring import (
    check_number,
    refuse_images,
    score_of_steps,
    span_texts,
    step_tokens,
)
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Prompt, Sample, Score

Model = Callable[[ModelInputs, Tensor], Tensor]
"""Logits at places (B, L), as those of a ``ProcessRewardModel``."""
Render = Callable[[Prompt, list[str]], tuple[list[int], list[int]]]
"""Token ids of a prompt and its steps, and the places of the steps' placeholders in them."""
_AGGREGATES: dict[str, Any] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}
"""Rewards of a response from its steps, by the names of ``--prm_aggregate``."""


def make_step_encoder(
    rewards: RewardConfig, tokenizer: PreTrainedTokenizerBase, where: str, template: str | None
) -> StepEncoder:
    """Encoder of prompts and steps for a process reward model; ``ValueError`` names the flag at fault.

    ``template`` is that of the policy's prompts, ``where`` the model's flag and name, for messages.
    """
    chat = rewards.prm_apply_chat_template
    if chat and not tokenizer.chat_template:
        raise ValueError(
            f"prm_apply_chat_template: the tokenizer of {where} has no chat template. Leave it out."
        )
    placeholder = rewards.prm_placeholder_token
    placeholder_id = single_token_id(
        tokenizer, placeholder, "prm_placeholder_token", flag_of_model="--prm_pretrain"
    )
    # Unless the model has a chat template, the prompt is in the policy's template already.
    input_template = "{}" if template is not None and not chat else None
    options = RowsConfig(input_template=input_template, apply_chat_template=chat)
    return StepEncoder(tokenizer, placeholder, placeholder_id, options=options)


@dataclass(frozen=True)
class StepRenderer:
    """Renders a prompt and steps for a process reward model, as ``train_prm`` renders lists of steps.

    ``config`` is the model's, ``where`` its flag and name, for messages.
    """

    encode: StepEncoder
    config: PreTrainedConfig
    where: str

    def __call__(self, prompt: Prompt, steps: list[str]) -> tuple[list[int], list[int]]:
        """Token ids, and the places of the placeholders; ``ValueError`` for ids that the model does not know."""
        question: Any = prompt.messages or prompt.text
        if prompt.messages and not self.encode.options.apply_chat_template:
            texts = [text_of(message["content"]) for message in prompt.messages]
            question = STEP_SEPARATOR.join(texts)
        ids, places = self.encode(question, steps)
        check_token_ids(self.config, self.where, self.encode.tokenizer, rows=[ids])
        return ids, places


class JudgedSteps(NamedTuple):
    """Steps of a sample as a process reward model reads them."""

    token_ids: list[int]
    """Ids of the model's own tokenizer."""
    places: list[int]
    """Places of the placeholders in them, one for each step."""
    ends: list[int]
    """Index in the sample's last segment of each step's last token."""


@dataclass
class ProcessScorer:
    """Scores from ``model``, which maps sequences and places, both (B, L), to logits (N, V) at the N places.

    ``--step_separator`` divides the response into steps, blank ones left out; ``render`` writes them for the model,
    with a placeholder after each. Only the last ``context`` tokens are kept, and steps before them are not judged. A
    step is worth p(good), the softmax over ``reward_ids`` (good, bad) at its placeholder. With
    ``--prm_aggregate steps`` that is the reward of the step's last token, times the weight of ``name``; else all steps
    of a response make one reward ``name``, which is 0 for a response without steps. ``where`` is the model's flag and
    name, for messages, and ``policy`` the tokenizer of the samples.
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
    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample; forwards run over neighbours in length."""
        refuse_images(str(self), samples)
        rows = [self.read(sample) for sample in samples]
        lengths = [len(row.token_ids) for row in rows]
        batches = equal_batches(lengths, self.size, self.comm)

        good: list[list[float]] = [[] for _ in rows]
        for batch in progress_bar(batches, "judging steps", enabled=self.comm.rank == 0):
            batch_good = self._forward([rows[i] for i in batch])
            for i, probabilities in zip(batch, batch_good, strict=True):
                good[i] = probabilities
        judged = zip(samples, rows, good, strict=True)
        return [
            self._score(sample, steps, probabilities) for sample, steps, probabilities in judged
        ]

    def read(self, sample: Sample) -> JudgedSteps:
        """Steps as the model reads them; no tokens for a response without steps."""
        separator = self.options.step_separator
        pieces: list[str] = []
        for text in span_texts(sample, self.policy):
            pieces += [piece.rstrip() for piece in text.split(separator) if piece.strip()]
        if not pieces:
            return JudgedSteps([], [], [])

        ends = step_tokens(sample, self.policy, separator)
        first, *others = pieces
        steps = [first, *(separator + piece for piece in others)]
        ids, places = self.render(sample.prompt, steps)

        kept = last_tokens(ids, self.context, self.where, sample=sample)
        n_dropped = len(ids) - len(kept)
        places = [place - n_dropped for place in places]
        n_cut = sum(place < 0 for place in places)  # steps
        return JudgedSteps(kept, places[n_cut:], ends[n_cut:])

    @torch.no_grad()
    def _forward(self, rows: Sequence[JudgedSteps]) -> list[list[float]]:
        """p(good) of the steps of each row; the model runs even without rows."""
        pad = self.pad_token_id
        ids = [row.token_ids for row in rows] or [[pad, pad]]
        inputs = ModelInputs.of_ids(ids, pad)
        places = torch.zeros(inputs.sequences.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            places[i, row.places] = True

        logits = self.model(inputs.to(self.device), places.to(self.device))  # (N, V)
        logits = logits[:, list(self.reward_ids)].float()  # (N, 2)
        good = logits.softmax(-1)[:, 0].cpu()  # (N,)
        n_steps = [len(row.places) for row in rows]
        return [row_good.tolist() for row_good in good.split(n_steps)]

    def _score(self, sample: Sample, steps: JudgedSteps, good: list[float]) -> Score:
        """Score of a sample from p(good) of its steps."""
        good = [check_number(p, sample, str(self)) for p in good]
        aggregate = self.options.prm_aggregate
        if aggregate == "steps":
            weight = self.options.weights().get(self.name, 1.0)
            return score_of_steps(sample.last, steps.ends, [weight * p for p in good])
        return Score({self.name: _AGGREGATES[aggregate](good) if good else 0.0})
