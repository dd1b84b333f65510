"""ExperienceMaker: trajectories with scores to experience with log-probs, values, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.config import PPOConfig
from openppo.experience.advantages import get_advantages_and_returns
from openppo.experience.collate import collate, idle_experience, split_rows
from openppo.experience.kl_controller import FixedKLController
from openppo.experience.token_rewards import compute_reward
from openppo.models.masked import compute_approx_kl, masked_sum
from openppo.tracking import Metrics, progress
from openppo.types import Comm, Experience, Trajectory

Model = Callable[..., Any]


class ExperienceMaker:
    """Runs the models over trajectories and computes what the losses need.

    ``actor`` and ``reference`` are called like ``Actor.forward``, ``critic`` like a ``ScalarHeadModel``; engines do.
    ``reference`` None means no KL penalty. All ranks call ``make`` together, each with its own trajectories, and
    run equally many forwards.
    """

    def __init__(
        self,
        actor: Model,
        critic: Model,
        reference: Model | None,
        config: PPOConfig,
        comm: Comm,
        device: torch.device,
        pad_token_id: int,
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.config = config
        self.comm = comm
        self.device = device
        self.pad_token_id = pad_token_id
        self.kl_controller = FixedKLController(config.init_kl_coef)

    def make(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> list[Experience]:
        """One experience per trajectory, in their order, on this maker's device."""
        order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].token_ids), reverse=True)
        size = self.config.micro_rollout_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        n_forwards = int(self.comm.all_reduce(torch.tensor(len(batches)), "max"))
        made: dict[int, Experience] = {}
        for rows in progress(batches, "experience", enabled=self.comm.rank == 0):
            batch = self._run_models(collate([trajectories[i] for i in rows], self.pad_token_id).to(self.device))
            batch = self._add_advantages(batch)
            self._measure(batch, metrics)
            made.update(zip(rows, split_rows(batch), strict=True))
        for _ in range(n_forwards - len(batches)):
            self._run_models(idle_experience().to(self.device))
        return [made[i] for i in range(len(trajectories))]

    @torch.no_grad()
    def _run_models(self, batch: Experience) -> Experience:
        """Add log-probs of actor and reference, entropy and values."""
        inputs = batch.sequences, batch.attention_mask, batch.action_mask
        log_probs, entropy = self.actor(*inputs, return_entropy=True)
        values = torch.where(batch.action_mask, self.critic(*inputs[:2]), 0.0)
        batch = batch.with_fields(log_probs=log_probs, entropy=entropy, values=values)
        return batch if self.reference is None else batch.with_fields(ref_log_probs=self.reference(*inputs))

    def _kl(self, batch: Experience, kl_estimator: Any) -> Tensor | None:
        if batch.ref_log_probs is None:
            return None
        assert batch.log_probs is not None
        return compute_approx_kl(batch.log_probs, batch.ref_log_probs, batch.action_mask, kl_estimator)

    def _add_advantages(self, batch: Experience) -> Experience:
        """Add token rewards, advantages and returns."""
        rewards = compute_reward(
            batch.scores,
            self._kl(batch, self.config.kl_estimator),
            batch.action_mask,
            self.kl_controller.value,
            self.config.reward_clip_range,
        )
        assert batch.values is not None
        advantages, returns = get_advantages_and_returns(
            batch.values, rewards, batch.action_mask, self.config.gamma, self.config.lambd
        )
        return batch.with_fields(rewards=rewards, advantages=advantages, returns=returns)

    def _measure(self, batch: Experience, metrics: Metrics) -> None:
        mask = batch.action_mask
        assert batch.log_probs is not None
        assert batch.entropy is not None
        assert batch.values is not None
        assert batch.returns is not None
        assert batch.advantages is not None
        metrics.add_tensor("reward", batch.scores)
        metrics.add_tensor("reward_std", batch.scores, reduce="std")
        for name, estimator in (("kl", "k1"), ("kl_k3", "k3")):
            kl = self._kl(batch, estimator)
            if kl is not None:
                metrics.add_tensor(name, kl, mask)
                metrics.add_tensor(f"{name}_per_response", masked_sum(kl, mask, -1))
        metrics.add_tensor("rollout_log_prob_gap", (batch.log_probs - batch.rollout_log_probs).abs(), mask)
        metrics.add_tensor("entropy", batch.entropy, mask)
        metrics.add_tensor("values", batch.values, mask)
        metrics.add_tensor("returns", batch.returns, mask)
        metrics.add_tensor("returns_std", batch.returns, mask, reduce="std")
        metrics.add_tensor("value_error_std", batch.returns - batch.values, mask, reduce="std")
        metrics.add_tensor("advantages", batch.advantages, mask)
        metrics.add_tensor("advantages_std", batch.advantages, mask, reduce="std")
        metrics.add_tensor("response_length", mask.sum(-1).float())
        metrics.add_tensor("truncated_fraction", batch.truncated.float())
