"""Scores of responses to held-out prompts, and their KL from the reference."""

from collections.abc import Sequence
from dataclasses import replace

from openppo.experience.maker import ExperienceMaker
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.models.log_probs import compute_approx_kl
from openppo.rewards import Scorer
from openppo.rollout.rollout import Rollout, wait_for_scores
from openppo.tracking import Metrics, PhaseTimer
from openppo.trainer.components import PPOComponents
from openppo.types import Sample


def scored_held_out(
    components: PPOComponents, responses: Sequence[Sample], scorer: Scorer | None
) -> Rollout:
    """Score responses with ``--eval_reward_fn``, else with ``scorer``; wait for the scores. Collective."""
    grading = components.grading
    if grading.scorer is not None:  # rewards that an agent gave are replaced
        responses = [response.with_scores({}) for response in responses]
    rollout = begin_scoring(grading.scorer or scorer, responses, components.stop, prefix="eval_")
    wait_for_scores(rollout, components.stop)
    check_rewarded(rollout, components.strategy.comm)
    return rollout


def measure_held_out_kl(
    maker: ExperienceMaker, responses: Sequence[Sample], metrics: Metrics
) -> None:
    """Measure ``eval_kl``: k1 of each action token, by the actor's present weights. Collective.

    It estimates KL(policy || reference) per token if ``responses`` are sampled at ``--temperature``.
    """
    if maker.count(responses) == 0:
        return
    hooks = replace(maker.hooks, timer=PhaseTimer())  # these tokens belong to no step
    forwards = replace(maker.forwards, hooks=hooks)
    batch = forwards(responses, "recompute", values=False)
    if batch is None:
        return
    assert batch.log_probs is not None and batch.ref_log_probs is not None
    kl = compute_approx_kl(batch.log_probs, batch.ref_log_probs, batch.action_mask)
    metrics.add_tensor("eval_kl", kl, batch.action_mask)
