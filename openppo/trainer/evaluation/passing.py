"""A warning for runs whose pass@k is 0 because no reward can reach ``--pass_reward``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from openppo import logger
from openppo.trainer.evaluation.evaluator import Grading
from openppo.types import Comm, Sample

_EVALUATIONS = 3
"""Evaluations without a passing response before the warning."""


@dataclass(eq=False)
class PassWatch:
    """Range and names of the deciding rewards, over all ranks and evaluations so far."""

    comm: Comm
    smallest: float = math.inf
    largest: float = -math.inf
    names: set[str] = field(default_factory=set)
    n_evaluations: int = 0
    has_warned: bool = False

    def look(self, grading: Grading, samples: Sequence[Sample], is_last: bool) -> None:
        """Warn once, at the last evaluation or the third, if no response has passed. Collective.

        Rewards must differ: equal rewards mean only that no response is right so far.
        """
        if grading.pass_reward is None or self.has_warned:
            return

        trained = [sample for sample in samples if sample.is_trained]
        deciding = [grading.deciding_reward(sample) for sample in trained]
        # others lack the reward of --pass_on
        rewards = [reward for reward in deciding if reward > -math.inf]
        lowest = min(rewards, default=math.inf)
        highest = max(rewards, default=-math.inf)
        score_names = set().union(*(sample.scores for sample in trained))

        gathered = self.comm.all_gather_object((lowest, highest, score_names))
        for smallest, largest, names in gathered:
            self.smallest = min(self.smallest, smallest)
            self.largest = max(self.largest, largest)
            self.names = self.names | names
        self.n_evaluations += 1
        if is_last or self.n_evaluations >= _EVALUATIONS:
            self._warn(grading)

    def _warn(self, grading: Grading) -> None:
        """Warn if the rewards cannot decide, or none of them has passed."""
        names = sorted(self.names)
        pass_on = grading.pass_on
        if pass_on is not None and names and self.largest == -math.inf:
            warning = f"--pass_on names {pass_on}, but the rewards are {', '.join(names)}. Use their names."
        elif self.smallest < self.largest and not grading.is_enough(self.largest):
            value = f"{pass_on or 'reward'} is {self.largest:.4g}, and --pass_reward is {grading.pass_reward:g}"
            choice = ""
            if len(names) > 1:
                choice = f", or name the reward that decides: --pass_on {' or '.join(names)}"
            warning = f"no held-out response has passed: the largest {value}. Lower it{choice}."
        else:
            return

        self.has_warned = True
        if self.comm.rank == 0:
            logger.warning(warning)
