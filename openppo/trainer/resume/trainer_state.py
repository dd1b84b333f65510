"""A PPO trainer's state in a checkpoint: counters, source, maker, skipped steps, callbacks."""

import dataclasses
from typing import TYPE_CHECKING, Any

from openppo.trainer.callbacks import restore_callbacks

if TYPE_CHECKING:
    from openppo.trainer.ppo import PPOTrainer


def trainer_state(trainer: "PPOTrainer") -> dict[str, Any]:
    """Return the state for ``restore_trainer``, as JSON."""
    callbacks = [
        {"class": type(callback).__name__, "state": callback.state_dict()}
        for callback in trainer.callbacks
    ]
    return {
        "state": dataclasses.asdict(trainer.state),
        "source": trainer.source.state_dict(),
        "maker": trainer.maker.state_dict(),
        "skipped": trainer.update.skipped.state_dict(),
        "should_stop": trainer.should_stop,
        "callbacks": callbacks,
        "evaluations": trainer.components.card.evaluations,
    }


def restore_trainer(trainer: "PPOTrainer", saved: dict[str, Any]) -> bool:
    """Resume from ``saved``, once models and optimizers have their state. Returns ``should_stop``."""
    trainer.state.load_state_dict(saved["state"])
    trainer.source.load_state_dict(saved["source"])
    trainer.maker.load_state_dict(saved["maker"])
    trainer.update.load_state_dict(saved["skipped"])
    trainer.components.card.resume(saved)
    has_same_callbacks = restore_callbacks(trainer.callbacks, saved["callbacks"])
    return has_same_callbacks and saved["should_stop"]
