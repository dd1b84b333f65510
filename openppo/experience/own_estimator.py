"""The advantage estimator that options name: one of ``ESTIMATORS``, or a user's ``Estimator`` in a file."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from openppo.config import AdvantageConfig, LossAggregation, TrainPPOConfig
from openppo.config.fields import names_file
from openppo.experience.estimators import ESTIMATORS, Estimator, Rewarded
from openppo.experience.token_rewards import StepRewards
from openppo.models.loss import POLICY_LOSSES
from openppo.user_code import find_object, split_location

FLAG = "--advantage_estimator"


def estimator_of(options: AdvantageConfig) -> Estimator:
    """Return the estimator of options; one of a file checks its results.

    ``ValueError`` names the flag and its value if the file has no such ``Estimator``.
    """
    location = options.advantage_estimator
    if not names_file(location):
        return ESTIMATORS[location]
    file, _ = split_location(location, FLAG)
    state = (0, 0)
    if file.is_file():
        stat = file.stat()
        state = (stat.st_mtime_ns, stat.st_size)
    return _load(location, state)


def loss_aggregation(config: TrainPPOConfig) -> LossAggregation:
    """``--loss_agg``, else the default of the policy loss, else that of the estimator."""
    policy_loss = POLICY_LOSSES.get(config.loss.loss_type)
    of_loss = None if policy_loss is None else policy_loss.loss_agg
    return config.loss.loss_agg or of_loss or estimator_of(config.advantage).loss_agg


def estimator_problems(config: TrainPPOConfig) -> Iterator[str]:
    """Yield a message if a file's estimator compares the responses to one prompt, and there is only one."""
    options = config.advantage
    is_own = names_file(options.advantage_estimator)
    if is_own and config.ppo.n_samples_per_prompt < 2 and estimator_of(options).compares_responses:
        yield (
            f"{FLAG} {options.advantage_estimator} compares the responses to one prompt: use --n_samples_per_prompt of "
            "at least 2."
        )


@lru_cache(maxsize=8)
def _load(location: str, state: tuple[int, int]) -> Estimator:
    """Load the estimator at ``path.py:name``, once for each ``state`` of its file: time and size."""
    return checked(find_object(location, FLAG, Estimator), f"{FLAG} {location}")


def checked(estimator: Estimator, where: str) -> Estimator:
    """Return ``estimator`` with functions that check their results; ``ValueError`` begins with ``where``."""

    def rewards(
        scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
    ) -> Rewarded:
        result = estimator.rewards(scores, steps, groups, greedy)
        wanted = "new scores (E,), and step rewards (E, L) or None"
        new_scores, new_steps = _pair(result, f"{where}: rewards", wanted)
        _check(new_scores, scores, f"{where}: rewards returned as scores")
        if new_steps is not None:
            _check(new_steps, steps.rewards, f"{where}: rewards returned as step rewards")
        return new_scores, new_steps

    def advantages(
        rewards: Tensor,
        values: Tensor | None,
        action_mask: Tensor,
        config: AdvantageConfig,
        lambd_critic: float | None,
    ) -> tuple[Tensor, Tensor]:
        result = estimator.advantages(rewards, values, action_mask, config, lambd_critic)
        pair = _pair(result, f"{where}: advantages", "advantages and returns, both (B, L)")
        inputs = rewards if values is None else rewards + values
        has_finite_inputs = bool(inputs.isfinite().all())  # a critic's values may not be
        for name, tensor in zip(("advantages", "returns"), pair, strict=True):
            place = f"{where}: advantages returned as {name}"
            _check(tensor, rewards, place, finite=has_finite_inputs)
            if bool((tensor[~action_mask] != 0).any()):
                raise ValueError(
                    f"{where}: advantages returned {name} that are not 0 outside of action_mask. Multiply by the mask."
                )
        return pair

    return replace(estimator, rewards=rewards, advantages=advantages)


def _pair(result: object, where: str, wanted: str) -> tuple[Tensor, Tensor]:
    """Return two results; ``ValueError`` for anything else."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{where} returned a {type(result).__name__}: give {wanted}.")
    first, second = result
    return first, second


def _check(tensor: object, like: Tensor, where: str, finite: bool = True) -> None:
    """``ValueError`` unless ``tensor`` has shape and dtype of ``like``, and ``finite`` numbers."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{where} a {type(tensor).__name__}: give a tensor.")
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        expected = f"{tuple(like.shape)} of {like.dtype}"
        raise ValueError(
            f"{where} a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}: {expected} is needed."
        )
    if finite and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{where} numbers that are not finite. Look for a division by 0.")
