"""Held-out prompts, answered and scored: mean rewards and pass@k, in all and for each data source."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from openppo import logger
from openppo.config import EvaluateConfig, EvaluationConfig, RewardConfig
from openppo.experience.measure import measure_scores
from openppo.rewards import Scorer
from openppo.rollout.episodes import by_episode, episode_reward
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.tracking.console import table_lines, write_line
from openppo.tracking.report.run_data import short_names
from openppo.types import Comm, Ending, Interrupted, Trajectory


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, from ``n`` responses of which ``c`` pass, how likely one of ``k`` passes.

    The share of subsets of size ``k`` with a passing response, which is unbiased (arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_ks(n: int) -> list[int]:
    """The k for which pass@k of ``n`` responses is reported: 1, 2, 4, ... and ``n`` itself."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


@dataclass(frozen=True)
class Grading:
    """How scored responses to held-out prompts become metrics.

    A response passes when the reward that decides is at least ``pass_reward``; without one pass@k is not measured. That
    is the score named ``pass_on``, else the weighted sum of its named scores and its token rewards.
    """

    comm: Comm
    pass_reward: float | None = 1.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    scorer: Scorer | None = None  # of evaluations alone
    pass_on: str | None = None

    @classmethod
    def of(
        cls,
        comm: Comm,
        rewards: RewardConfig,
        options: EvaluationConfig | EvaluateConfig,
        scorer: Scorer | None = None,
    ) -> "Grading":
        """That of ``rewards``, with ``--pass_reward`` and ``--pass_on`` of ``options``."""
        pass_reward = rewards.pass_threshold(options.pass_reward, options.pass_on)
        return cls(comm, pass_reward, rewards.weights(), scorer=scorer, pass_on=options.pass_on)

    def measure(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics ``eval_...``, and ``eval/<short name of source>/...`` if the prompts have several sources.

        Responses to one prompt are neighbours with one ``group``. All ranks call this together, with their own
        trajectories; the result is empty if no rank has any.
        """
        metrics, mine = Metrics(), {_source(t): None for t in trajectories}
        names = short_names(
            source for of_rank in self.comm.all_gather_object(list(mine)) for source in of_rank
        )
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.group):
            responses = list(group)
            self._measure_prompt(responses, metrics, prefix="eval_")
            if len(names) > 1:
                self._measure_prompt(
                    responses, metrics, prefix=f"eval/{names[_source(responses[0])]}/"
                )
        if isinstance(trajectories, Rollout):
            metrics.merge(trajectories.metrics)
        return metrics.reduced(self.comm)

    def passes(self, parts: Sequence[Trajectory]) -> bool:
        """Tell for the ``parts`` of a response or episode; False without a ``pass_reward``."""
        return self.is_enough(self.deciding_reward(parts))

    def deciding_reward(self, parts: Sequence[Trajectory]) -> float:
        """The score named ``pass_on``, -inf where it is missing; else all that was earned.

        Of several tasks, one without that score passes by all that was earned.
        """
        last = parts[-1]
        if self.pass_on is None or (last.prompt.task and self.pass_on not in last.scores):
            return episode_reward(parts, self.reward_weights)
        return last.scores.get(self.pass_on, -math.inf)

    def is_enough(self, reward: float) -> bool:
        """Compare with ``pass_reward``, up to the rounding of a weighted sum; False without one."""
        if self.pass_reward is None:
            return False
        return reward >= self.pass_reward or math.isclose(reward, self.pass_reward, rel_tol=1e-9)

    def _measure_prompt(
        self, responses: Sequence[Trajectory], metrics: Metrics, prefix: str
    ) -> None:
        episodes = by_episode(responses)
        n_passed = sum(map(self.passes, episodes))
        for k in pass_ks(len(episodes)) if self.pass_reward is not None else []:
            metrics.add(f"{prefix}pass@{k}", pass_at_k(len(episodes), n_passed, k))
        for episode in [parts[-1].episode for parts in episodes]:
            if episode is not None:
                metrics.add(f"{prefix}agent/turns", episode.n_turns)
                for ending in Ending:
                    metrics.add(f"{prefix}agent/{ending.value}", episode.ending is ending)
        measure_scores(responses, self.reward_weights, metrics, prefix=prefix)
        for response in responses:
            metrics.add(f"{prefix}response_length", sum(response.action_mask))
            metrics.add(f"{prefix}truncated_fraction", response.truncated)


def evaluation_table(metrics: Mapping[str, float], sources: Sequence[str]) -> list[str]:
    """One line for each metric, one column for all prompts and, if there are several, for each of their ``sources``.

    ``sources`` has that of each prompt; ``metrics`` are named as ``Grading`` names them.
    """
    names = short_names(sources)
    columns = {"all": "eval_"} | {
        name: f"eval/{name}/" for name in sorted(names.values()) if len(names) > 1
    }
    counts = {"all": len(sources), **Counter(names[source] for source in sources)}
    rows = [["", *columns], ["prompts", *(str(counts[column]) for column in columns)]]
    for name in [name.removeprefix("eval_") for name in metrics if name.startswith("eval_")]:
        if name.startswith("agent/") and metrics[f"eval_{name}"] == 0:
            continue  # an ending that no episode has
        values = [metrics.get(prefix + name) for prefix in columns.values()]
        rows.append([name, *("-" if value is None else f"{value:.4f}" for value in values)])
    return table_lines(rows, stream=sys.stdout)


def evaluate_alone(trainer: Any) -> None:
    """Evaluate what a ``PPOTrainer`` has loaded, log it and print the table; nothing is trained and no model saved."""
    parts = trainer.components
    with parts.trackers:
        try:
            metrics = trainer.evaluate()
        except Interrupted as signal:
            return logger.info("stopped by %s: --val_only has evaluated nothing", signal)
        parts.trackers.log(trainer.global_step, metrics)
    if parts.strategy.is_main:
        lines = evaluation_table(
            metrics, [prompt.task or prompt.source for prompt in parts.data.held_out]
        )
        write_line("\n".join(lines), sys.stdout)


def _source(trajectory: Trajectory) -> str:
    """What its metrics are named after: its task, else its data source."""
    return trajectory.prompt.task or trajectory.prompt.source
