"""KL of held-out samples from the reference."""

from collections.abc import Sequence
from dataclasses import replace

from openppo.experience.maker import ExperienceMaker
from openppo.models.log_probs import compute_approx_kl
from openppo.tracking import Metrics, PhaseTimer
from openppo.types import Sample


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
