"""How many samples, passes and optimizer steps a run of train_ppo has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from openppo.config import TrainPPOConfig


@dataclass(frozen=True)
class StepPlan:
    """One global step on ``n_prompts`` prompts, over all ranks unless it says otherwise."""

    n_prompts: int
    n_samples: int
    """Responses that are trained on."""
    most_on_a_rank: int
    """Of the responses that are sampled."""
    forwards: int | None
    """Passes of each model on the busiest rank to make experience, at least; None with ``--micro_rollout_tokens``."""
    mini_batches: int
    """In each epoch: as many optimizer steps of actor and critic."""
    micro_batches: int | None
    """Of a full mini-batch, on each rank, at least; None with ``--micro_train_tokens``."""
    optimizer_steps: int


@dataclass(frozen=True)
class BatchPlan:
    """All global steps: of each of ``episodes`` the same ones, ``steps`` of full batches and perhaps a small one."""

    episodes: int
    steps: list[StepPlan]
    max_steps: int | None = None
    """``--max_steps``, which may end the last episode early."""

    @property
    def n_steps(self) -> int:
        """Global steps."""
        n_steps = self.episodes * len(self.steps)
        return n_steps if self.max_steps is None else min(n_steps, self.max_steps)

    def optimizer_steps(self, without: int = 0) -> int:
        """Optimizer steps after the first ``without`` global steps."""
        return sum([step.optimizer_steps for step in self.steps * self.episodes][without : self.n_steps])


def batch_plan(config: TrainPPOConfig, n_prompts: int, world_size: int, n_steps: int | None = None) -> BatchPlan:
    """The plan for ``n_prompts`` prompts; with ``--dynamic_sampling`` it is the most that there can be.

    A source without prompts has ``n_steps`` steps, each planned as one of full batches.
    """
    if n_steps is not None:
        full_batch = _step_plan(config, config.ppo.rollout_batch_size, world_size)
        return BatchPlan(1, [full_batch] * n_steps, config.ppo.max_steps)
    full, rest = divmod(n_prompts, config.ppo.rollout_batch_size)
    sizes = [config.ppo.rollout_batch_size] * full + [rest] * (rest > 0)
    steps = [_step_plan(config, size, world_size) for size in sizes]
    return BatchPlan(config.ppo.num_episodes, steps, config.ppo.max_steps)


def _step_plan(config: TrainPPOConfig, n_prompts: int, world_size: int) -> StepPlan:
    ppo, batch = config.ppo, config.batch
    bounds = [rank * n_prompts // world_size for rank in range(world_size + 1)]  # as prompts are dealt out
    on_ranks = [(end - start) * ppo.n_samples_per_prompt for start, end in itertools.pairwise(bounds)]
    kept = [min(n, ppo.buffer_limit) if ppo.buffer_limit > 0 else n for n in on_ranks]
    n_samples, most = sum(kept), max(on_ranks)
    mini_batches = _parts(n_samples, batch.train_batch_size)
    share = _parts(min(n_samples, batch.train_batch_size), world_size)
    return StepPlan(
        n_prompts=n_prompts,
        n_samples=n_samples,
        most_on_a_rank=most,
        forwards=None if ppo.micro_rollout_tokens else _parts(most, ppo.micro_rollout_batch_size),
        mini_batches=mini_batches,
        micro_batches=None if ppo.micro_train_tokens else _parts(share, batch.micro_train_batch_size),
        optimizer_steps=batch.max_epochs * mini_batches,
    )


def _parts(n: int, size: int) -> int:
    return -(-n // size)
