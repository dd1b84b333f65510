"""ExperienceMaker: trajectories with scores to experience with log-probs, values, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.config.ppo import OldLogProbsFrom
from openppo.experience.collate import collate, idle_experience, join_rows, split_rows
from openppo.experience.estimators import ESTIMATORS, compare, compute_advantages
from openppo.experience.kl_controller import AdaptiveKLController, FixedKLController
from openppo.experience.measure import measure_experience, measure_scores
from openppo.experience.score_shaping import RunningMoments, overlong_mask, shape_scores
from openppo.experience.token_rewards import StepRewards, collect_step_rewards, compute_reward, kl_penalty
from openppo.models.padding import MicroBatchSize, micro_batches, split_overhead
from openppo.tracking import Metrics, progress_bar
from openppo.types import Comm, Experience, FinishReason, NeverStops, StopCheck, Trajectory

Model = Callable[..., Any]


class ExperienceMaker:
    """Runs the models over trajectories and computes what the losses need.

    ``actor`` and ``reference`` are called like ``Actor.forward``, ``critic`` like a ``ScalarHeadModel``; engines do.
    ``critic`` None is for estimators without one, ``reference`` None means no KL penalty. All ranks call every
    method together, each with its own trajectories; those of one group must be on one rank.
    """

    def __init__(
        self,
        actor: Model,
        critic: Model | None,
        reference: Model | None,
        config: TrainPPOConfig,
        comm: Comm,
        device: torch.device,
        pad_token_id: int,
        stop: StopCheck | None = None,
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.config = config
        self.comm = comm
        self.device = device
        self.pad_token_id = pad_token_id
        self.stop = stop or NeverStops()
        self.estimator = ESTIMATORS[config.advantage.advantage_estimator]
        self.weights = config.rewards.weights()
        self.normalizes_scores = config.shaping.normalize_reward and config.shaping.reward_normalizer == "running"
        self.moments, self.step_moments = RunningMoments(), RunningMoments()
        kl = config.kl
        self.kl_controller = (
            FixedKLController(kl.init_kl_coef)
            if kl.kl_target is None
            else AdaptiveKLController(kl.init_kl_coef, kl.kl_target, kl.kl_horizon)
        )

    def make(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> list[Experience]:
        """One experience per trajectory, in their order, on this maker's device."""
        return self.add_advantages(self.run_models(trajectories), trajectories, metrics)

    @torch.no_grad()
    def run_models(
        self, trajectories: Sequence[Trajectory], *, old_log_probs: OldLogProbsFrom = "recompute", values: bool = True
    ) -> list[Experience]:
        """Log-probs of actor and reference, entropy and values; needs no scores. Equally many forwards on all ranks.

        ``old_log_probs`` "rollout" takes the trajectories' own for the actor's, "training" leaves them to the forward
        that is trained on; then there is no entropy either. ``values`` False leaves the critic to training too.

        Raises ``Interrupted`` on all ranks when it should be left.
        """
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        batches = micro_batches(lengths, forward_size(self.config))
        n_forwards = int(self.comm.all_reduce(torch.tensor(len(batches)), "max"))
        made: dict[int, Experience] = {}
        for rows in progress_bar(batches, "experience", enabled=self.comm.rank == 0):
            self.stop()
            batch = collate([trajectories[i] for i in rows], self.pad_token_id).to(self.device)
            batch = self._forward(batch, old_log_probs, values)
            made.update(zip(rows, split_rows(batch), strict=True))
        for _ in range(n_forwards - len(batches)):
            self.stop()
            self._forward(idle_experience().to(self.device), old_log_probs, values)
        return [made[i] for i in range(len(trajectories))]

    def add_advantages(
        self,
        experiences: Sequence[Experience],
        trajectories: Sequence[Trajectory],
        metrics: Metrics,
        lambd_critic: float | None = None,
    ) -> list[Experience]:
        """Scores to token rewards, advantages and returns, for what ``run_models`` made of scored ``trajectories``.

        ``lambd_critic`` stands in for the option of that name.
        """
        batch = self.add_rewards(experiences, trajectories, metrics)
        if batch is None:
            return []
        batch = self.add_returns(batch, lambd_critic)
        measure_experience(batch, metrics)
        if self.config.shaping.overlong_filter:
            batch = batch.with_fields(action_mask=overlong_mask(batch.action_mask, batch.truncated))
        return list(split_rows(batch))

    def add_rewards(
        self, experiences: Sequence[Experience], trajectories: Sequence[Trajectory], metrics: Metrics
    ) -> Experience | None:
        """One batch with token rewards, which need no values; None on a rank that has no experience."""
        if self.normalizes_scores:
            self.moments.update(self._total_scores(trajectories), self.comm)
            self.step_moments.update(torch.tensor([r for t in trajectories for r in t.step_rewards]), self.comm)
        if not experiences:
            return None
        measure_scores(trajectories, self.config.rewards, metrics)
        earned = torch.tensor([t.total_reward(self.weights) for t in trajectories], device=self.device)
        return self._add_rewards(join_rows(experiences).with_fields(scores=earned), trajectories, metrics)

    def add_returns(self, batch: Experience, lambd_critic: float | None = None) -> Experience:
        """Advantages and returns of a batch with rewards, and with values if the estimator asks for them."""
        assert batch.rewards is not None
        advantages, returns = compute_advantages(
            self.estimator, batch.rewards, batch.values, batch.action_mask, self.config.advantage, lambd_critic
        )
        return batch.with_fields(advantages=advantages, returns=returns)

    def _forward(self, batch: Experience, old_log_probs: OldLogProbsFrom, values: bool) -> Experience:
        inputs = batch.sequences, batch.attention_mask, batch.action_mask
        if old_log_probs == "recompute":
            log_probs, entropy = self.actor(*inputs, return_entropy=True)
            batch = batch.with_fields(log_probs=log_probs, entropy=entropy)
        elif old_log_probs == "rollout":
            batch = batch.with_fields(log_probs=batch.rollout_log_probs)
        if self.critic is not None and values:
            batch = batch.with_fields(values=torch.where(batch.action_mask, self.critic(*inputs[:2]), 0.0))
        return batch if self.reference is None else batch.with_fields(ref_log_probs=self.reference(*inputs))

    def _add_rewards(self, batch: Experience, trajectories: Sequence[Trajectory], metrics: Metrics) -> Experience:
        """Add token rewards: KL penalty, scores and steps after the baseline."""
        shaped, steps = self._shaped_scores(trajectories), self._step_rewards(trajectories)
        metrics.add_tensor("shaped_reward", shaped if steps is None else steps.added_to(shaped))
        groups = torch.tensor([t.group for t in trajectories], device=self.device)
        scores, token_rewards = compare(self.estimator, shaped, steps, groups, self._greedy_totals(trajectories))
        kl_coef = 0.0 if self.config.kl.use_kl_loss else self.kl_controller.value
        rewards = compute_reward(scores, self._kl(batch), batch.action_mask, kl_coef, token_rewards=token_rewards)
        return batch.with_fields(rewards=rewards)

    def _kl(self, batch: Experience) -> Tensor | None:
        if batch.ref_log_probs is None:
            return None
        return kl_penalty(batch.known_log_probs, batch.ref_log_probs, batch.action_mask, self.config.kl.kl_estimator)

    def _total_scores(self, trajectories: Sequence[Trajectory]) -> Tensor:
        return torch.tensor([t.total_score(self.weights) for t in trajectories], dtype=torch.float32)

    def _shaped_scores(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Scores (B,) normalized, penalized and clipped as the options say."""
        scores, shaping = self._total_scores(trajectories), self.config.shaping
        if self.normalizes_scores:
            scores = self.moments.normalize(scores, self.step_moments.variance)
        truncated = torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories])
        lengths = torch.tensor([sum(t.action_mask) for t in trajectories])
        max_len = self.config.generation.generate_max_len
        return shape_scores(scores, truncated, lengths, shaping, max_len).to(self.device)

    def _step_rewards(self, trajectories: Sequence[Trajectory]) -> StepRewards | None:
        """Step rewards, normalized with the same divisor as the scores."""
        steps = collect_step_rewards(trajectories, self.device)
        if steps is None or not self.normalizes_scores:
            return steps
        normalized = self.step_moments.normalize(steps.rewards, self.moments.variance)
        return StepRewards(torch.where(steps.ends, normalized, 0.0), steps.ends)

    def _greedy_totals(self, trajectories: Sequence[Trajectory]) -> Tensor | None:
        """What the greedy response to each trajectory's prompt earned, (B,); None for estimators that do not ask."""
        if not self.estimator.needs_greedy:
            return None
        greedy = [t.greedy for t in trajectories if t.greedy is not None]
        assert len(greedy) == len(trajectories), "each trajectory needs its greedy response"
        shaped, steps = self._shaped_scores(greedy), self._step_rewards(greedy)
        return shaped if steps is None else steps.added_to(shaped)


def forward_size(config: TrainPPOConfig) -> MicroBatchSize:
    """Of a forward over samples that trains nothing."""
    ppo = config.ppo
    overhead = split_overhead(config.deepspeed.zero_stage)
    return MicroBatchSize(ppo.micro_rollout_batch_size, ppo.micro_rollout_tokens, overhead)
