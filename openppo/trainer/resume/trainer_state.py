"""State of a PPO trainer in a checkpoint, beside its models: counters, source, maker, skipped steps, callbacks."""

import dataclasses
from typing import TYPE_CHECKING, Any

from openppo.trainer.callbacks import restore_callbacks

if TYPE_CHECKING:
    from openppo.trainer.ppo import PPOTrainer


def trainer_state(trainer: "PPOTrainer") -> dict[str, Any]:
    """What ``restore_trainer`` takes, as JSON."""
    return {
        "state": dataclasses.asdict(trainer.state),
        "source": trainer.source.state_dict(),
        "maker": trainer.maker.state_dict(),
        "skipped": trainer.update.skipped.state_dict(),
        "should_stop": trainer.should_stop,
        "callbacks": [
            {"class": type(each).__name__, "state": each.state_dict()} for each in trainer.callbacks
        ],
    }


def restore_trainer(trainer: "PPOTrainer", saved: dict[str, Any]) -> bool:
    """Continue from a state; models and optimizers have theirs again. Returns ``should_stop``."""
    vars(trainer.state).update(saved["state"])
    trainer.source.load_state_dict(saved["source"])
    trainer.maker.load_state_dict(saved["maker"])
    trainer.update.load_state_dict(saved["skipped"])
    has_same_callbacks = restore_callbacks(trainer.callbacks, saved["callbacks"])
    return has_same_callbacks and saved["should_stop"]
