"""What a PPO trainer remembers beside its engines, as JSON and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from openppo.strategy.checkpoint.random_state import RandomState, get_random_state
from openppo.tracking import Metrics
from openppo.trainer.callbacks import Callback
from openppo.trainer.components import StepInProgress, TrainState
from openppo.types import Comm

if TYPE_CHECKING:
    from openppo.trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger("openppo")

StartOfStep = tuple[dict[str, Any], RandomState]
"""What ``ppo_state`` and the random numbers were before a step took its prompts."""


def ppo_state(trainer: PPOTrainer) -> dict[str, Any]:
    """The same on all ranks, which call it together."""
    step = trainer.in_progress
    return {
        "progress": dataclasses.asdict(trainer.progress),
        "kl_controller": trainer.maker.kl_controller.state_dict(),
        "moments": trainer.maker.moments.state_dict(),
        "step_moments": trainer.maker.step_moments.state_dict(),
        "skipped": trainer.update_step.skipped.state_dict(),
        "unreported": trainer.unreported,
        "should_stop": trainer.should_stop,
        "callbacks": [{"class": type(each).__name__, "state": each.state_dict()} for each in trainer.callbacks],
        "in_progress": None if step is None else _step_state(step, trainer.comm),
    }


def state_to_save(trainer: PPOTrainer) -> tuple[dict[str, Any], dict[str, Tensor], RandomState]:
    """State, experience and random numbers to go on from; of a step that has no experience yet those of its start."""
    if trainer.in_progress is not None:
        return ppo_state(trainer), trainer.replay_buffer.state_dict(), get_random_state()
    state, random_state = trainer.start_of_step or (ppo_state(trainer), get_random_state())
    return state, {}, random_state


def restore_ppo(trainer: PPOTrainer, state: dict[str, Any], experience: dict[str, Tensor]) -> None:
    """Put a trainer where ``ppo_state`` found one; ``experience`` is the replay buffer's if a step was in progress."""
    trainer.progress = TrainState(**state["progress"])
    trainer.update_step.go_on_from(trainer.progress)
    trainer.components.engine.version = trainer.progress.policy_version
    trainer.maker.kl_controller.load_state_dict(state["kl_controller"])
    trainer.maker.moments.load_state_dict(state["moments"])
    if "step_moments" in state:  # earlier checkpoints have none
        trainer.maker.step_moments.load_state_dict(state["step_moments"])
    trainer.update_step.skipped.load_state_dict(state["skipped"])
    trainer.unreported = state["unreported"]
    are_the_same = restore_callbacks(trainer.callbacks, state["callbacks"])
    if are_the_same and state.get("should_stop", False):
        trainer.should_stop = True
        logger.info("the run had stopped early: its model is saved, and it does not go on")
    if state["in_progress"] is not None:
        trainer.in_progress = _step_of(state["in_progress"], trainer.comm)
        trainer.replay_buffer.load_state_dict(experience)


def restore_callbacks(callbacks: Sequence[Callback], saved: Sequence[dict[str, Any]]) -> bool:
    """Give each callback the state of the next one of its class in ``saved``. Whether they are the same as then."""
    left = list(saved)
    for callback in callbacks:
        found = next((each for each in left if each["class"] == type(callback).__name__), None)
        if found is not None:
            left.remove(found)
            callback.load_state_dict(found["state"])
    were, are = [each["class"] for each in saved], [type(callback).__name__ for callback in callbacks]
    if were != are:
        logger.warning(
            "callbacks were %s and are %s: those of one class go on in their order, others begin anew",
            ", ".join(were) or "none",
            ", ".join(are) or "none",
        )
    return were == are


def _step_state(step: StepInProgress, comm: Comm) -> dict[str, Any]:
    return {
        "n_samples": step.n_samples,
        "optimizer_steps": step.optimizer_steps,
        "actor_done": step.actor_done,
        "critic_done": step.critic_done,
        "ranks": comm.all_gather_object(
            {"metrics": step.metrics.state_dict(), "n_tokens": step.n_tokens, "samples": step.samples}
        ),
    }


def _step_of(state: dict[str, Any], comm: Comm) -> StepInProgress:
    """What ranks measured before goes to the ranks of the same number, of which there may be fewer or more."""
    metrics, mine = Metrics(), state["ranks"][comm.rank :: comm.world_size]
    for of_rank in mine:
        metrics.load_state_dict(of_rank["metrics"])
    return StepInProgress(
        metrics,
        n_samples=state["n_samples"],
        n_tokens=sum(of_rank["n_tokens"] for of_rank in mine),
        samples=mine[0]["samples"] if mine else [],
        optimizer_steps=state["optimizer_steps"],
        actor_done=state["actor_done"],
        critic_done=state.get("critic_done", False),
    )
