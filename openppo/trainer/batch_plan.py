"""Arithmetic of a run's global and optimizer steps."""

import itertools
from dataclasses import dataclass

from openppo.config import TrainPPOConfig
from openppo.types import RolloutSource


@dataclass(frozen=True)
class BatchPlan:
    """Global steps of a run; with ``--dynamic_sampling`` an upper bound."""

    config: TrainPPOConfig
    n_ranks: int
    steps: list[
        int
    ]  # prompts of each step of one episode, all of full batches except perhaps the last
    episodes: int

    @property
    def n_steps(self) -> int:
        """Global steps, of which ``--max_steps`` may leave out the last."""
        n_steps, most = self.episodes * len(self.steps), self.config.ppo.max_steps
        return n_steps if most is None else min(n_steps, most)

    def n_samples(self, n_prompts: int) -> int:
        """Responses to so many prompts that are trained on, over all ranks."""
        ppo, n_ranks = self.config.ppo, self.n_ranks
        bounds = [
            rank * n_prompts // n_ranks for rank in range(n_ranks + 1)
        ]  # as prompts are dealt out
        on_ranks = [
            (end - start) * ppo.n_samples_per_prompt for start, end in itertools.pairwise(bounds)
        ]
        return sum(min(on_rank, ppo.buffer_limit or on_rank) for on_rank in on_ranks)

    def mini_batches(self, n_prompts: int) -> int:
        """Optimizer steps of actor and critic in each epoch on so many prompts."""
        return -(-self.n_samples(n_prompts) // self.config.batch.train_batch_size)

    def optimizer_steps(self, without: int = 0) -> int:
        """Optimizer steps after the first ``without`` global steps."""
        steps = (self.steps * self.episodes)[without : self.n_steps]
        return sum(map(self.mini_batches, steps)) * self.config.batch.max_epochs


def batch_plan(
    config: TrainPPOConfig, n_ranks: int, n_prompts: int, source: RolloutSource | None
) -> BatchPlan:
    """Plan for ``n_prompts`` prompts, or full batches of a ``source`` or environment that says how many."""
    full, has_no_end = (
        config.prompts_per_step,
        config.agents.environment is not None and not config.data.prompt_data,
    )
    if source is not None or has_no_end:
        steps = None if source is None else source.steps
        if not (n_steps := config.ppo.max_steps if steps is None else steps):
            raise ValueError(
                "--max_steps is missing: the source of trajectories does not say how many steps it has."
            )
        return BatchPlan(config, n_ranks, [full] * n_steps, episodes=1)
    rest = [n_prompts % full] if n_prompts % full else []
    return BatchPlan(
        config, n_ranks, [full] * (n_prompts // full) + rest, episodes=config.ppo.num_episodes
    )
