"""Forwards of actor, critic and reference over segments, and the source of old log-probs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.experience.hooks import Hooks
from openppo.experience.replay_buffer import collate
from openppo.media import Media, TokenIds
from openppo.model_inputs import ModelInputs
from openppo.models.batching import MicroBatchSize, split_overhead
from openppo.models.dealing import Deal
from openppo.models.equal_batches import equal_batches
from openppo.models.padding import on_device
from openppo.models.sampled_ids import SampledIds
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience, Sample, Segment, segments_of

Model = Callable[..., Any]
OldLogProbsFrom = Literal["recompute", "rollout", "training"]


@dataclass(frozen=True)
class Forwards:
    """Forwards of the models of an ``ExperienceMaker`` over segments; the fields are the maker's. Collective."""

    actor: Model
    critic: Model | None
    reference: Model | None
    config: TrainPPOConfig
    comm: Comm
    device: torch.device
    pad_token_id: int
    hooks: Hooks
    resolved: Resolved

    def __call__(
        self, samples: Sequence[Sample], old_log_probs: OldLogProbsFrom, values: bool
    ) -> Experience | None:
        """One batch with log-probs, entropy and values; None on a rank without samples."""
        recompute = old_log_probs == "recompute"
        runs_critic = values and self.critic is not None
        outputs: dict[str, Tensor] = {}
        if recompute or runs_critic or self.reference is not None:
            outputs = self._outputs(samples, recompute, values)
        if not samples:
            return None

        batch = collate(samples, self.pad_token_id)
        batch = batch.to(self.device).with_fields(**outputs)
        if old_log_probs == "rollout":
            batch = batch.with_fields(log_probs=batch.rollout_log_probs)
        return batch

    @torch.no_grad()
    def _outputs(
        self, samples: Sequence[Sample], recompute: bool, values: bool
    ) -> dict[str, Tensor]:
        """Fields (B, L) of this rank's segments, from equally many forwards on all ranks.

        Rows are dealt out to all ranks for the forwards, so a forward may have rows from other ranks.
        """
        shares_prompts = self.resolved.shares_prompts
        groups: list[tuple[int, int]] = []
        if shares_prompts:
            for sample in samples:
                groups += [(sample.group, _first_action(segment)) for segment in sample.segments]

        segments = segments_of(samples)
        deal = Deal([len(segment.token_ids) for segment in segments], self.comm, groups)
        own_columns = []
        for segment in segments:
            inputs = ModelInputs.of([segment], self.pad_token_id)
            own_columns.append(_Row(inputs, torch.tensor([segment.loss_mask])).columns())
        media = deal.media([segment.media for segment in segments])
        rows = [
            _Row.of_columns(columns, row_media)
            for columns, row_media in zip(deal.out(own_columns), media, strict=True)
        ]

        lengths = [row.action_mask.shape[1] for row in rows]
        ids = [row.inputs.distinct_rows[0] for row in rows if shares_prompts]

        fields: dict[str, Tensor] = {}  # fields of the last batch
        row_outputs = [torch.empty(0)] * len(rows)  # each becomes (N, L)
        with self.hooks.uncompiled():
            limit = forward_size(self.config, self.resolved)
            batches = equal_batches(lengths, limit, self.comm, rows=ids)
            for batch in progress_bar(batches, "experience", enabled=self.comm.rank == 0):
                fields = self._forward([rows[i] for i in batch], recompute, values)
                stacked = torch.stack([*fields.values()]).float()  # (N, B, L)
                for row, i in enumerate(batch):
                    # A copy, so that no row keeps the whole batch in memory.
                    row_outputs[i] = stacked[:, row, : lengths[i]].clone()
        self.hooks.timer.count_tokens("experience", sum(lengths))

        own_outputs = [output.T for output in deal.back(row_outputs)]  # each (L, N)
        if not own_outputs:
            return {}
        padded = pad_sequence(own_outputs, batch_first=True).to(self.device)  # (B, L, N)
        return dict(zip(fields, padded.permute(2, 0, 1).contiguous(), strict=False))

    def _forward(self, rows: Sequence["_Row"], recompute: bool, values: bool) -> dict[str, Tensor]:
        """Fields (B, L) of ``rows``; without rows an idle forward runs."""
        rows = rows or [_IDLE]
        inputs = ModelInputs.join([row.inputs for row in rows])
        actions = pad_sequence([row.action_mask[0] for row in rows], batch_first=True)  # (B, L)

        fields: dict[str, Tensor] = {}
        if recompute:
            with timed("actor_forward"):
                log_probs, entropy = self.actor(inputs, actions, return_entropy=True)
            fields["log_probs"] = log_probs
            fields["entropy"] = entropy
        if self.critic is not None and values:
            with timed("critic_forward"):
                is_action = on_device(actions, self.device)
                state_values = self.critic(inputs)
                fields["values"] = torch.where(is_action, state_values, 0.0)
        if self.reference is not None:
            with timed("reference_forward"):
                fields["ref_log_probs"] = self.reference(inputs, actions)
        return fields


@dataclass(frozen=True)
class _Row:
    """One row of a forward."""

    inputs: ModelInputs  # (1, L)
    action_mask: Tensor  # (1, L) bool

    def columns(self) -> Tensor:
        """Return all tensors without images as one, (N, L) int32, that ranks send each other."""
        return torch.cat([*self.inputs.tensors().values(), self.action_mask]).int()

    @classmethod
    def of_columns(cls, columns: Tensor, media: Media) -> "_Row":
        """Return the row of ``columns``, with its images."""
        *inputs, action_mask = columns[:, None]  # (1, L) each
        tensors = {
            name: tensor.to(example.dtype)
            for tensor, (name, example) in zip(inputs, _IDLE.inputs.tensors().items(), strict=True)
        }
        return cls(ModelInputs(**tensors).with_media([media]), action_mask.bool())


_IDLE = _Row(ModelInputs.of([TokenIds([0, 0])], 0), torch.zeros(1, 2, dtype=torch.bool))
"""Row of a rank that has fewer forwards than others."""


def _first_action(segment: Segment) -> int:
    """Index of the first action token; 0 without actions."""
    spans = segment.spans
    return spans[0][0] if spans else 0


def check_sampled(samples: Sequence[Sample], ids: SampledIds, comm: Comm) -> None:
    """Raise ``ValueError`` on all ranks for an action that can never be sampled. Collective.

    The probability of such an action is 0.
    """
    left_out = set(chain.from_iterable(ids.left_out))
    problem = None
    for segment in segments_of(samples):
        place = _first_of(left_out, segment)
        if place is not None:
            reason = ids.why_not(segment.token_ids[place])
            problem = f"token {place} of a sample is trained on, but {reason}"
            break

    problems = [text for text in comm.all_gather_object(problem) if text is not None]
    if problems:
        remedy = "Set its action_mask to False, or, if it is an EOS or stop token, add it to the tokenizer."
        raise ValueError(f"{problems[0]}. {remedy}")


def _first_of(token_ids: set[int], segment: Segment) -> int | None:
    """Index of the first trained action among ``token_ids``; None if there is none."""
    mask = segment.loss_mask
    if token_ids.isdisjoint(compress(segment.token_ids, mask)):
        return None
    actions = compress(enumerate(segment.token_ids), mask)
    return next(t for t, token_id in actions if token_id in token_ids)


def old_log_probs_from(
    config: TrainPPOConfig, single_update: bool, by_engine: bool = True
) -> OldLogProbsFrom:
    """Source of the old policy's log-probs, see ``--old_log_probs``; "training": the forward that is trained on.

    ``single_update``: one optimizer step trains the actor on all samples, starting from the weights that sampled them.
    ``by_engine``: this run's engine sampled them; log-probs from another source may mean anything.
    """
    requested = config.loss.wanted_old_log_probs
    if requested != "auto":
        return requested

    generation = config.generation
    is_cut = generation.top_p < 1 or generation.top_k is not None or generation.min_new_tokens > 0
    if not by_engine or is_cut or generation.rollout_engine != "hf":
        return "recompute"
    if config.loss.correction.method != "none":
        return "recompute"
    if not config.deepspeed.bf16:
        return "rollout"

    # Every global step of the run must be one update; with several epochs ``entropy`` would change.
    n_samples = config.prompts_per_step * config.ppo.n_samples_per_prompt
    fits_one_update = n_samples <= config.batch.train_batch_size and config.batch.max_epochs == 1
    if single_update and fits_one_update and config.lora.lora_dropout == 0:
        return "training"
    return "recompute"


def forward_size(config: TrainPPOConfig, resolved: Resolved) -> MicroBatchSize:
    """Size of a forward that trains nothing."""
    return MicroBatchSize(
        rows=config.ppo.forward_rows,
        tokens=resolved.micro_rollout_tokens,
        overhead=split_overhead(config.deepspeed.zero_stage),
    )
