"""Which forward passes experience makes, and which it leaves to the training of the same weights."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ReplayBuffer
from openppo.tracking import Metrics, PhaseTimer
from openppo.trainer.steps.experience_step import ExperienceStep
from openppo.types import SingleProcess

BASE = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "rollout_batch_size": 4, "train_batch_size": 4}


class Asked(Exception):  # noqa: N818 (what is asked, no error)
    """Where old log-probs come from, and whether the critic is asked for values."""


def asked(n_samples: int, recompute: bool = False, trains_actor: bool = True, **options: Any) -> tuple[str, bool]:
    """How the models are run over so many samples."""
    config = from_options(TrainPPOConfig, **(BASE | options))

    def run_models(trajectories: Any, old_log_probs: str, values: bool) -> list[Any]:
        raise Asked(old_log_probs, values)

    estimator = SimpleNamespace(normalizes=lambda _: False)
    parts: Any = SimpleNamespace(
        strategy=SimpleNamespace(comm=SingleProcess(), uncompiled=nullcontext),
        maker=SimpleNamespace(run_models=run_models, estimator=estimator),
        critic=object(),
        train=lambda mode: None,
    )
    update_step: Any = SimpleNamespace(trains_actor=trains_actor)
    sample_log: Any = None
    step = ExperienceStep(config, parts, ReplayBuffer(), update_step, sample_log, PhaseTimer())
    samples: list[Any] = [SimpleNamespace(token_ids=[1, 2])] * n_samples
    with pytest.raises(Asked) as asked:
        step.make(samples, Metrics(), recompute, lambda: None)
    return asked.value.args  # type: ignore[return-value]


def test_the_critic_is_asked_only_where_the_first_step_does_not_train_on_everything() -> None:
    assert asked(4) == ("rollout", False)
    assert asked(3) == ("rollout", False)
    assert asked(5) == ("rollout", True)
    assert asked(0) == ("rollout", True), "there is no step"


@pytest.mark.parametrize(
    "options",
    [{"buffer_limit": 8}, {"overlong_filter": True}, {"lora_rank": 2, "lora_dropout": 0.1}],
    ids=lambda options: " ".join(options),
)
def test_the_critic_is_asked_where_its_training_forward_would_give_something_else(options: dict[str, Any]) -> None:
    assert asked(4, **options) == ("rollout", True)
    assert asked(4, bf16=True, **options)[1]


def test_old_log_probs_in_bfloat16_are_left_to_training_only_where_it_sees_all_samples() -> None:
    assert asked(4, bf16=True) == ("training", False)
    assert asked(5, bf16=True) == ("recompute", True)
    assert asked(4, bf16=True, recompute=True) == ("recompute", False), "for trajectories that others sampled"
    assert asked(4, bf16=True, trains_actor=False) == ("recompute", False), "nobody else computes them"
    assert asked(4, bf16=True, rollout_batch_size=8) == ("recompute", False), "one step like the others"
