"""Length of a run in global steps, and passes over its prompts."""

from openppo.config import TrainPPOConfig
from openppo.types import RolloutSource


class RunLength:
    """Global steps of a run on the samples of ``source``; dynamic sampling uses prompts up and so shortens it."""

    def __init__(self, config: TrainPPOConfig, source: RolloutSource) -> None:
        self.ppo = config.ppo
        self.source = source
        self.planned = source.steps or self.steps
        """Steps when the run began or resumed."""

    @property
    def steps(self) -> int:
        """Global steps of the whole run; an upper bound with dynamic sampling."""
        limits = (self.source.steps, self.ppo.max_steps)
        return min(n for n in limits if n is not None)

    def episodes(self, global_step: int) -> float:
        """Passes over the prompts after ``global_step``; steps whose prompts are used up count as done."""
        used_up = self.planned - (self.source.steps or self.steps)
        return (used_up + global_step) * self.ppo.num_episodes / self.planned
