"""Prompts to scored trajectories: sampling with the actor's weights, rewards, and the choice of useful groups."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from openppo.config import TrainPPOConfig
from openppo.datasets import shard
from openppo.experience.score_shaping import one_reward_groups
from openppo.rewards import PendingScores, start_scoring
from openppo.rollout.rollout import check_weights, sample_trajectories, write_scores
from openppo.strategy.policy_weights import PolicyWeights
from openppo.trainer.components import PPOComponents
from openppo.types import Prompt, SamplingParams, Trajectory

logger = logging.getLogger("openppo")


class RolloutStep:
    """Samples responses with the actor's weights and has them scored. All ranks call every method together."""

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents) -> None:
        self.comm = parts.strategy.comm
        self.actor = parts.actor
        self.engine = parts.engine
        self.policy_weights = PolicyWeights(parts.strategy, parts.actor)
        self.scorer = parts.scorer
        self.needs_greedy = parts.maker.estimator.needs_greedy
        self.compares_steps = parts.maker.estimator.steps == "normalized"
        self.stop = parts.stop
        self.n_samples = config.ppo.n_samples_per_prompt
        self.rollout_batch_size = config.ppo.rollout_batch_size
        self.seed = config.deepspeed.seed
        self.weights = config.rewards.weights()
        options = config.generation
        self.params = SamplingParams(options.generate_max_len, options.temperature, options.top_p, options.top_k)

    def full_weights(self) -> AbstractContextManager[None]:
        """Inside, the engine may decode, with the actor's weights of now."""
        self.actor.train(False)
        return self.engine.awake(self.policy_weights)

    def sample(self, prompts: Sequence[Prompt], first_group: int) -> list[Trajectory]:
        """Responses to this rank's share of ``prompts``, which are numbered from ``first_group`` in the whole run."""
        world, rank = self.comm.world_size, self.comm.rank
        mine, first = shard(prompts, rank, world), first_group + rank * len(prompts) // world
        with self.full_weights():
            sampled = sample_trajectories(self.engine, mine, self.params, self.n_samples, self.seed, first)
            if self.needs_greedy:
                greedy_params = dataclasses.replace(self.params, temperature=0.0)
                greedy = sample_trajectories(self.engine, mine, greedy_params, 1, self.seed, first)
                for i, trajectory in enumerate(sampled):
                    trajectory.greedy = greedy[i // self.n_samples]
        return sampled

    def start_scoring(self, trajectories: Sequence[Trajectory]) -> Callable[[], int]:
        """Begin to score; the function returned waits for the scores and writes them into the trajectories.

        It returns the number of samples on which the reward function raised. ``Interrupted`` as of ``PendingScores``.
        """
        greedy = list({id(t.greedy): t.greedy for t in trajectories if t.greedy is not None}.values())
        everything = [*trajectories, *greedy]
        pending: PendingScores = start_scoring(self.scorer, everything, self.stop, show_progress=self.comm.rank == 0)

        def finish() -> int:
            scores = pending.wait()
            write_scores(everything, scores)
            check_weights(everything, self.weights)
            return sum(score.failed for score in scores)

        return finish

    def useful(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Those whose group has several different rewards; the others have nothing to learn from (arXiv 2503.14476)."""
        if not trajectories:
            return []
        rewards = torch.tensor([t.total_reward(self.weights) for t in trajectories])
        if self.compares_steps:  # unequal steps teach something though their sums be equal
            kinds: dict[tuple[float, ...], int] = {}
            earned = [(t.total_score(self.weights), *t.step_rewards) for t in trajectories]
            rewards = torch.tensor([kinds.setdefault(each, len(kinds)) for each in earned])
        same = one_reward_groups(rewards, torch.tensor([t.group for t in trajectories]))
        return [t for t, drop in zip(trajectories, same.tolist(), strict=True) if not drop]

    def count_groups(self, trajectories: Sequence[Trajectory]) -> int:
        """Groups over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len({t.group for t in trajectories}))))

    def first_groups(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Of all ranks' groups the first ``rollout_batch_size``: dealt out as a rollout deals prompts."""
        everyones = [t for rank in self.comm.all_gather_object(list(trajectories)) for t in rank]
        groups = sorted({t.group for t in everyones})[: self.rollout_batch_size]
        if not groups and self.comm.rank == 0:
            logger.warning("no prompt's responses got different rewards: nothing to train on")
        mine = set(shard(groups, self.comm.rank, self.comm.world_size))
        return sorted((t for t in everyones if t.group in mine), key=lambda t: t.group)
