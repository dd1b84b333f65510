"""Metrics of responses to held-out prompts: rewards and pass@k, in all and by source."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from openppo.config import EvaluateConfig, EvaluationConfig, RewardConfig
from openppo.experience.measure import measure_lengths, measure_scores
from openppo.rewards import Scorer
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.tracking.console import table_lines
from openppo.tracking.report.run_data import short_names
from openppo.types import Comm, Ending, Sample


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, from ``n`` responses of which ``c`` pass, how likely one of ``k`` passes.

    This is the fraction of subsets of size ``k`` with a passing response, unbiased (arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_ks(n: int) -> list[int]:
    """Return each k of pass@k for ``n`` responses: 1, 2, 4, ... and ``n``."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


@dataclass(frozen=True)
class Grading:
    """Rules by which scored responses to held-out prompts become metrics.

    A response passes when its deciding reward is at least ``pass_reward``; without one pass@k is not measured. The
    deciding reward is the score named ``pass_on``, else the weighted sum of its named scores and its token rewards.
    """

    comm: Comm
    pass_reward: float | None = 1.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    has_rewards: bool = True
    """False if nothing rewards a response."""
    scorer: Scorer | None = None
    """Scorer of evaluations, where it is not that of training."""
    pass_on: str | None = None

    @classmethod
    def of(
        cls,
        comm: Comm,
        rewards: RewardConfig,
        options: EvaluationConfig | EvaluateConfig,
        scorer: Scorer | None = None,
    ) -> "Grading":
        """Make the grading by ``rewards``, with ``--pass_reward`` and ``--pass_on`` of ``options``."""
        pass_reward = rewards.pass_threshold(options.pass_reward, options.pass_on)
        return cls(
            comm,
            pass_reward,
            rewards.weights(),
            has_rewards=not rewards.are_none,
            scorer=scorer,
            pass_on=options.pass_on,
        )

    @property
    def measured_weights(self) -> Mapping[str, float] | None:
        """Weights of the rewards that are measured; None if there are none."""
        return self.reward_weights if self.has_rewards else None

    def measure(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return metrics ``eval_...``, and ``eval/<short name of source>/...`` if there are several sources.

        Samples of one prompt are neighbours with one ``group``. All ranks call this together, with their own samples;
        the result is empty if no rank has any.
        """
        metrics = Metrics()
        sources = list(dict.fromkeys(_source(sample) for sample in samples))
        names = short_names(chain.from_iterable(self.comm.all_gather_object(sources)))
        for _, group in groupby(samples, key=lambda sample: sample.group):
            prompt_samples = list(group)
            self._measure_prompt(prompt_samples, metrics, prefix="eval_")
            if len(names) > 1:
                name = names[_source(prompt_samples[0])]
                self._measure_prompt(prompt_samples, metrics, prefix=f"eval/{name}/")
        if isinstance(samples, Rollout):
            metrics.merge(samples.metrics)
        return metrics.reduced(self.comm)

    def passes(self, sample: Sample) -> bool:
        """True if a sample passes; False without a ``pass_reward``."""
        return self.is_enough(self.deciding_reward(sample))

    def deciding_reward(self, sample: Sample) -> float:
        """Return the score named ``pass_on``, -inf where it is missing; without a name the total reward.

        A task of ``--tasks`` without that score passes by its total reward.
        """
        if self.pass_on is None or (sample.prompt.task and self.pass_on not in sample.scores):
            return sample.total_reward(self.reward_weights)
        return sample.scores.get(self.pass_on, -math.inf)

    def is_enough(self, reward: float) -> bool:
        """True if ``reward`` reaches ``pass_reward``, up to the rounding of a weighted sum."""
        if self.pass_reward is None:
            return False
        return reward >= self.pass_reward or math.isclose(reward, self.pass_reward, rel_tol=1e-9)

    def _measure_prompt(self, samples: Sequence[Sample], metrics: Metrics, prefix: str) -> None:
        """Add the metrics of all samples of one prompt."""
        if self.pass_reward is not None:
            n_passed = sum(map(self.passes, samples))
            for k in pass_ks(len(samples)):
                passing = pass_at_k(len(samples), n_passed, k)
                metrics.add(f"{prefix}pass@{k}", passing)
                metrics.add(f"{prefix}pass@{k}_ci95", passing, reduce="ci95")

        for sample in samples:
            episode = sample.episode
            if episode is not None:
                metrics.add(f"{prefix}agent/turns", episode.n_turns)
                for ending in Ending:
                    metrics.add(f"{prefix}agent/{ending.value}", episode.ending is ending)

        measure_scores(samples, self.measured_weights, metrics, prefix=prefix)
        if self.has_rewards:
            # Samples of one prompt are alike, so prompts are the independent values.
            earned = [sample.total_reward(self.reward_weights) for sample in samples]
            metrics.add(f"{prefix}reward_ci95", sum(earned) / len(earned), reduce="ci95")
        measure_lengths(samples, metrics, prefix=prefix)


def evaluation_table(metrics: Mapping[str, float], sources: Sequence[str]) -> list[str]:
    """Return lines of a table: a row for each metric, columns for all prompts and each source.

    ``sources`` has the source of each prompt; ``metrics`` are named as ``Grading`` names them.
    """
    names = short_names(sources)
    prefixes = {"all": "eval_"}
    if len(names) > 1:
        prefixes |= {name: f"eval/{name}/" for name in sorted(names.values())}
    counts = {"all": len(sources), **Counter(names[source] for source in sources)}

    rows = [["", *prefixes], ["prompts", *(str(counts[name]) for name in prefixes)]]
    for metric in metrics:
        if not metric.startswith("eval_"):
            continue
        name = metric.removeprefix("eval_")
        if name.startswith("agent/") and metrics[metric] == 0:
            continue  # an ending that no episode has
        values = [metrics.get(prefix + name) for prefix in prefixes.values()]
        rows.append([name, *("-" if value is None else f"{value:.4f}" for value in values)])
    return table_lines(rows, stream=sys.stdout)


def _source(sample: Sample) -> str:
    """Name of a sample in metrics: its task, else its data source."""
    return sample.prompt.task or sample.prompt.source
