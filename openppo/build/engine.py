"""Fifth phase: the engine of a rank that trains, and what its players need."""

from dataclasses import dataclass

from openppo.build.check import Checked
from openppo.build.data import LoadedData
from openppo.build.engines import training_engine
from openppo.build.images import prepare_for_images
from openppo.build.models import Models
from openppo.models.pretrained import context_length, eos_token_ids
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.rollout.players import PlayerParts
from openppo.strategy.signals import SignalStop
from openppo.types import StopCheck

SHOWS_IMAGES = "images"
"""Key in the launch's store: "yes" if samples may contain images.

Trainers post it, and rollout ranks wait for it.
"""


@dataclass(frozen=True)
class Sampling:
    """Engine and parts of players, None if the caller's source makes the samples; ``stop`` polls signals."""

    stop: StopCheck
    engine: Engine | None = None
    parts: PlayerParts | None = None


def make_engine(checked: Checked, data: LoadedData, models: Models) -> Sampling:
    """Start the engine and seed this rank; ``ValueError`` if the engine samples wrongly from the actor."""
    strategy = checked.strategy
    stop = SignalStop(strategy.comm)
    if checked.tasks is None:
        strategy.seed_per_rank()
        return Sampling(stop)

    engine = training_engine(
        checked.config,
        strategy,
        models.actor,
        tokenizer=checked.tokenizer,
        actor_config=checked.actor_config,
    )
    strategy.seed_per_rank()  # after the engine, because vLLM seeds all generators too

    vision = prepare_for_images(checked, data.run_data, models, engine=engine)
    if strategy.is_main:
        strategy.launch.post(SHOWS_IMAGES, "no" if vision is None else "yes")
    parts = PlayerParts(
        driver=EngineDriver(engine, stop),
        tokenizer=checked.tokenizer,
        eos_token_ids=eos_token_ids(models.actor.module.model, checked.tokenizer),
        comm=strategy.comm,
        longest=data.run_data.longest,
        context=context_length(checked.actor_config),
        vision=vision,
    )
    return Sampling(stop, engine, parts)
