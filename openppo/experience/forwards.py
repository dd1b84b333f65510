"""Forwards of actor, critic and reference over trajectories, and where old log-probs come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.experience.replay_buffer import collate
from openppo.media import Media, distinct_ids
from openppo.models.batching import MicroBatchSize, split_overhead
from openppo.models.dealing import Deal
from openppo.models.equal_batches import equal_batches
from openppo.models.padding import on_device, pad_right
from openppo.models.sampled_ids import SampledIds
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience, Trajectory

Model = Callable[..., Any]
OldLogProbsFrom = Literal["recompute", "rollout", "training"]


@dataclass(frozen=True)
class Forwards:
    """Runs the models of an ``ExperienceMaker`` over trajectories; its fields are the maker's. Collective."""

    actor: Model
    critic: Model | None
    reference: Model | None
    config: TrainPPOConfig
    comm: Comm
    device: torch.device
    pad_token_id: int
    hooks: Hooks

    def __call__(
        self, trajectories: Sequence[Trajectory], old_log_probs: OldLogProbsFrom, values: bool
    ) -> Experience | None:
        """One batch with log-probs of actor and reference, entropy and values; None on a rank without trajectories."""
        runs_any = (
            old_log_probs == "recompute"
            or (values and self.critic is not None)
            or self.reference is not None
        )
        outputs = (
            self._outputs(trajectories, old_log_probs == "recompute", values) if runs_any else {}
        )
        if not trajectories:
            return None
        batch = collate(trajectories, self.pad_token_id).to(self.device).with_fields(**outputs)
        return (
            batch.with_fields(log_probs=batch.rollout_log_probs)
            if old_log_probs == "rollout"
            else batch
        )

    @torch.no_grad()
    def _outputs(
        self, trajectories: Sequence[Trajectory], recompute: bool, values: bool
    ) -> dict[str, Tensor]:
        """Fields (B, L) of own trajectories, some from forwards on other ranks. Equally many forwards on all ranks."""
        shares, outputs = self.config.ppo.share_prompts == "auto", dict[str, Tensor]()
        groups = [(t.group, t.spans[0][0] if t.spans else 0) for t in trajectories if shares]
        deal = Deal([len(t.token_ids) for t in trajectories], self.comm, groups)
        rows = deal.out(
            [torch.tensor([t.token_ids, t.loss_mask], dtype=torch.int32) for t in trajectories]
        )
        media = deal.media([t.prompt.media for t in trajectories])
        made = rows[:]
        lengths = [r.shape[1] for r in rows]
        ids = [
            distinct_ids(row[0].tolist(), of_row)
            for row, of_row in zip(rows, media, strict=True)
            if shares
        ]
        with self.hooks.uncompiled():
            batches = equal_batches(lengths, forward_size(self.config), self.comm, rows=ids)
            for chosen in progress_bar(batches, "experience", enabled=self.comm.rank == 0):
                outputs = self._forward(
                    [rows[i] for i in chosen], [media[i] for i in chosen], recompute, values=values
                )
                stacked = torch.stack([*outputs.values()]).float()  # (N, B, L)
                for row, i in enumerate(chosen):
                    made[i] = stacked[
                        :, row, : lengths[i]
                    ].clone()  # no row keeps the whole batch in memory
        self.hooks.timer.count_tokens("experience", sum(lengths))
        own = [row.T for row in deal.back(made)]
        joined = (
            pad_sequence(own, batch_first=True).to(self.device).permute(2, 0, 1).contiguous()
            if own
            else ()
        )
        return dict(zip(outputs, joined, strict=False))

    def _forward(
        self, rows: list[Tensor], media: list[Media], recompute: bool, values: bool
    ) -> dict[str, Tensor]:
        """Fields (B, L) of ``rows``, each (2, L): token ids, and 1 for actions. Without rows of an idle forward."""
        rows = rows or [torch.zeros(2, 2)]
        ids, mask = pad_right([row[0] for row in rows], self.pad_token_id)
        actions, outputs = pad_right([row[1] for row in rows], 0)[0].bool(), dict[str, Tensor]()
        more: dict[str, Any] = {"media": media} if any(media) else {}
        if recompute:
            with timed("actor_forward"):
                outputs["log_probs"], outputs["entropy"] = self.actor(
                    ids, mask, actions, return_entropy=True, **more
                )
        if self.critic is not None and values:
            with timed("critic_forward"):
                outputs["values"] = torch.where(
                    on_device(actions, self.device), self.critic(ids, mask, **more), 0.0
                )
        if self.reference is not None:
            with timed("reference_forward"):
                outputs["ref_log_probs"] = self.reference(ids, mask, actions, **more)
        return outputs


def check_sampled(trajectories: Sequence[Trajectory], ids: SampledIds, comm: Comm) -> None:
    """``ValueError`` on all ranks for an action that can never be sampled: its probability is 0. Collective."""
    left_out = set(chain.from_iterable(ids.left_out))
    problem = None
    for trajectory in trajectories:
        token_ids, mask = trajectory.token_ids, trajectory.loss_mask
        if not left_out.isdisjoint(compress(token_ids, mask)):
            place = next(
                t for t, is_action in enumerate(mask) if is_action and token_ids[t] in left_out
            )
            problem = (
                f"token {place} of a sample is trained on, but {ids.why_not(token_ids[place])}"
            )
            break

    if problems := [of_rank for of_rank in comm.all_gather_object(problem) if of_rank is not None]:
        remedy = "Set its action_mask to False, or, if it is an EOS or stop token, add it to the tokenizer."
        raise ValueError(f"{problems[0]}. {remedy}")


def old_log_probs_from(
    config: TrainPPOConfig, single_update: bool, by_engine: bool = True
) -> OldLogProbsFrom:
    """Source of the old policy's log-probs, see ``--old_log_probs``; "training": the forward that is trained on.

    ``single_update``: one optimizer step trains the actor on all samples, with the weights that sampled them;
    ``by_engine``: this run's engine did. Log-probs of other trajectories may be anything.
    """
    if (wanted := config.loss.wanted_old_log_probs) != "auto":
        return wanted
    generation = config.generation
    ppo = config.ppo
    batch = config.batch
    cut = generation.top_p < 1 or generation.top_k is not None or generation.min_new_tokens > 0
    if (
        not by_engine
        or cut
        or generation.rollout_engine != "hf"
        or config.loss.rollout_correction != "none"
    ):
        return "recompute"
    if not config.deepspeed.bf16:
        return "rollout"
    samples = config.prompts_per_step * ppo.n_samples_per_prompt
    always = (
        samples <= batch.train_batch_size and batch.max_epochs == 1
    )  # with several epochs ``entropy`` would change
    return "training" if single_update and always and config.lora.lora_dropout == 0 else "recompute"


def forward_size(config: TrainPPOConfig) -> MicroBatchSize:
    """Size of a forward that trains nothing."""
    rows, tokens = config.ppo.forward_rows, config.ppo.micro_rollout_tokens
    return MicroBatchSize(rows, tokens, split_overhead(config.deepspeed.zero_stage))
