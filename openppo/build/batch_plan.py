"""Arithmetic of a run's global and optimizer steps."""

from dataclasses import dataclass

from openppo.config import TrainPPOConfig
from openppo.types import RolloutSource


@dataclass(frozen=True)
class BatchPlan:
    """Global steps of a run; with ``--dynamic_sampling`` an upper bound."""

    config: TrainPPOConfig
    n_ranks: int
    steps: list[int]
    """Prompts of each step of one pass over the prompts: full batches, except perhaps the last."""
    prompt_epochs: int
    """Passes over the prompts (``--num_episodes``)."""

    @property
    def n_steps(self) -> int:
        """Global steps, at most ``--max_steps``."""
        n_steps = self.prompt_epochs * len(self.steps)
        max_steps = self.config.ppo.max_steps
        return n_steps if max_steps is None else min(n_steps, max_steps)

    def n_samples(self, n_prompts: int) -> int:
        """Responses to ``n_prompts`` prompts that are trained on, over all ranks."""
        return n_prompts * self.config.ppo.n_samples_per_prompt

    def mini_batches(self, n_prompts: int) -> int:
        """Optimizer steps of actor and critic in each epoch on ``n_prompts`` prompts."""
        return -(-self.n_samples(n_prompts) // self.config.batch.train_batch_size)

    def optimizer_steps(self, without: int = 0) -> int:
        """Optimizer steps after the first ``without`` global steps."""
        steps = (self.steps * self.prompt_epochs)[without : self.n_steps]
        return sum(map(self.mini_batches, steps)) * self.config.batch.max_epochs


def batch_plan(
    config: TrainPPOConfig, n_ranks: int, n_prompts: int, source: RolloutSource | None
) -> BatchPlan:
    """Plan steps of ``n_prompts`` prompts.

    With a ``source``, or an environment without prompts, all batches are full, as many as the source or ``--max_steps``
    says.
    """
    full = config.prompts_per_step
    is_endless = config.agents.environment is not None and not config.data.prompt_data
    if source is not None or is_endless:
        n_steps = None if source is None else source.steps
        if n_steps is None:
            n_steps = config.ppo.max_steps
        if not n_steps:
            raise ValueError(
                "--max_steps is missing: the source of samples does not say how many steps it has."
            )
        return BatchPlan(config, n_ranks, [full] * n_steps, prompt_epochs=1)

    steps = [full] * (n_prompts // full)
    if n_prompts % full:
        steps.append(n_prompts % full)
    return BatchPlan(config, n_ranks, steps, prompt_epochs=config.ppo.num_episodes)
