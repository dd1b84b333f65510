"""Held-out prompts, answered and scored: mean rewards and pass@k, in all and for each data source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from openppo.experience.measure import measure_scores
from openppo.rewards import Scorer, start_scoring
from openppo.rollout.rollout import Rollout, by_episode, check_weights, episode_reward, write_scores
from openppo.tracking import Metrics
from openppo.tracking.report.run_data import short_names
from openppo.types import Comm, Ending, FinishReason, StopCheck, Trajectory


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, from ``n`` responses of which ``c`` pass, how likely one of ``k`` passes.

    The share of subsets of size ``k`` with a passing response, which is unbiased (arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_ks(n: int) -> list[int]:
    """The k for which pass@k of ``n`` responses is reported: 1, 2, 4, ... and ``n`` itself."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    weights: Mapping[str, float],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """A rollout of ``trajectories`` on which scoring has begun, and on the greedy responses beside them.

    An episode is scored once, by its last trajectory, unless it failed or has a reward of the whole already. The metric
    ``reward_errors``, with ``prefix`` only if there are any, counts those on which the reward function raises. Reading
    raises ``ValueError`` if ``weights`` names no reward.
    """
    greedy = list({id(t.greedy): t.greedy for t in trajectories if t.greedy is not None}.values())
    metrics, parts = Metrics(), [of_one for of_one in by_episode([*trajectories, *greedy]) if needs_score(of_one[-1])]
    scored = [of_episode[-1] for of_episode in parts]
    wait_for = start_scoring(scorer, scored, stop) if scorer is not None else list

    def write() -> None:
        scores = wait_for()
        for score, of_episode in zip(scores, parts, strict=scorer is not None):
            write_scores(of_episode[-1:], [score])
            for other in of_episode[:-1]:
                other.scores.update(score.rewards)
        check_weights(scored, weights)
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def needs_score(trajectory: Trajectory) -> bool:
    """Whether sources of rewards score it: not an episode that failed or has a reward of the whole already."""
    return trajectory.episode is None or (trajectory.episode.ending.is_trained and not trajectory.scores)


@dataclass(frozen=True)
class Grading:
    """How scored responses to held-out prompts become metrics.

    A response passes when its reward, the weighted sum of its named scores and its token rewards, is at least
    ``pass_reward``; without one pass@k is not measured.
    """

    comm: Comm
    pass_reward: float | None = 1.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    def measure(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics ``eval_...``, and ``eval/<short name of source>/...`` if the prompts have several sources.

        Responses to one prompt are neighbours with one ``group``. All ranks call this together, with their own
        trajectories; the result is empty if no rank has any.
        """
        metrics, mine = Metrics(), {t.prompt.source: None for t in trajectories}
        names = short_names(source for of_rank in self.comm.all_gather_object(list(mine)) for source in of_rank)
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.group):
            responses = list(group)
            self._measure_prompt(responses, metrics, prefix="eval_")
            if len(names) > 1:
                self._measure_prompt(responses, metrics, prefix=f"eval/{names[responses[0].prompt.source]}/")
        if isinstance(trajectories, Rollout):
            metrics.merge(trajectories.metrics)
        return metrics.reduced(self.comm)

    def passes(self, reward: float) -> bool:
        """Whether ``reward`` is at least ``pass_reward``, if there is one, up to the rounding of a weighted sum."""
        if self.pass_reward is None:
            return False
        return reward >= self.pass_reward or math.isclose(reward, self.pass_reward, rel_tol=1e-9)

    def _measure_prompt(self, responses: Sequence[Trajectory], metrics: Metrics, prefix: str) -> None:
        rewards = [episode_reward(parts, self.reward_weights) for parts in by_episode(responses)]
        for reward in rewards if any(response.episode is not None for response in responses) else []:
            metrics.add(f"{prefix}reward_max", reward, reduce="max")
            metrics.add(f"{prefix}reward_min", reward, reduce="min")
        n_passed = sum(map(self.passes, rewards))
        for k in pass_ks(len(rewards)) if self.pass_reward is not None else []:
            metrics.add(f"{prefix}pass@{k}", pass_at_k(len(rewards), n_passed, k))
        for episode in [parts[-1].episode for parts in by_episode(responses)]:
            if episode is not None:
                metrics.add(f"{prefix}agent/turns", episode.n_turns)
                for ending in Ending:
                    metrics.add(f"{prefix}agent/{ending.value}", episode.ending is ending)
        measure_scores(responses, self.reward_weights, metrics, prefix)
        for response in responses:
            metrics.add(f"{prefix}response_length", sum(response.action_mask))
            metrics.add(f"{prefix}truncated_fraction", response.finish_reason is FinishReason.LENGTH)
