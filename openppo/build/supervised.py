"""Builder of the trainers of causal language models, reward models and process reward models."""

from functools import partial
from typing import Any

from torch import nn

from openppo.build.memory.estimate import Estimate, estimate_supervised
from openppo.build.memory.machine import Machine
from openppo.build.memory.passes import Batch
from openppo.build.memory.shortage import explain_shortage
from openppo.build.memory.sizing import log_memory
from openppo.build.summary import log_supervised_start
from openppo.build.supervised_data import SupervisedData, load_supervised_data
from openppo.build.supervised_model import load_model
from openppo.build.trackers import start_trackers
from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.models.actor import Actor
from openppo.models.loading import freeze_vision
from openppo.models.padding import pack_where_exact
from openppo.models.scalar_head import ProcessRewardModel, ScalarHeadModel
from openppo.models.size import ModelSize
from openppo.models.vision_models import n_patches
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.signals import SignalStop
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.cards.run_card import make_run_card
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.resume.edited_files import user_files
from openppo.trainer.supervised.loop import (
    SupervisedComponents,
    SupervisedTrainer,
    total_optimizer_steps,
)
from openppo.trainer.supervised.trainers import ProcessRewardTrainer, RewardModelTrainer, SFTTrainer

_TRAINERS: dict[type, type[SupervisedTrainer[Any]]] = {
    TrainSFTConfig: SFTTrainer,
    TrainRMConfig: RewardModelTrainer,
    TrainPRMConfig: ProcessRewardTrainer,
}
"""Trainers by the config of their command."""


def build_supervised_trainer(
    config: Any, strategy: DeepspeedStrategy | None = None
) -> SupervisedTrainer[Any]:
    """Build the trainer of a supervised command; ``ValueError`` names the flag to change."""
    if strategy is None:
        strategy = DeepspeedStrategy(config.deepspeed)
    comm = strategy.comm
    trainer_class = _TRAINERS[type(config)]
    role = "reward model" if isinstance(config, TrainRMConfig) else "model"

    data = load_supervised_data(config, strategy, trainer_class)
    estimate = log_memory(
        partial(_estimate, config, data),
        {role: ("--pretrain", config.supervised.pretrain)},
        config,
        strategy=strategy,
    )
    card = make_run_card(config, comm, config.supervised.pretrain, rows=data.counts)
    checkpointer = Checkpointer(
        config,
        strategy,
        trainer_class.kind,
        data={"--dataset": examples_fingerprint(data.train)},
        user_files=user_files(config),
        facts=card.facts,
    )

    n_steps = total_optimizer_steps(config, len(data.train))
    with strategy.loading():
        module = load_model(config, data.tokenizer)
    model = _prepared(config, strategy, module, data=data, role=role, n_steps=n_steps)
    checkpointer.attach({"model": model})

    trackers = start_trackers(
        config,
        strategy,
        trainer_class.headline,
        total_steps=n_steps,
        resume_step=checkpointer.found_step,
    )
    components = SupervisedComponents(
        strategy=strategy,
        tokenizer=data.tokenizer,
        model=model,
        train_examples=data.train,
        eval_examples=data.held_out,
        trackers=trackers,
        checkpointer=checkpointer,
        stop=SignalStop(comm),
        explain_memory=partial(explain_shortage, estimate),
        peaks=None if estimate is None else estimate.peaks,
        card=card,
    )
    trainer = trainer_class(config, components)
    checkpointer.begin(trainer.load_checkpoint)
    log_supervised_start(trainer)
    return trainer


def _prepared(
    config: Any,
    strategy: DeepspeedStrategy,
    module: nn.Module,
    data: SupervisedData,
    role: str,
    n_steps: int,
) -> TrainableModel:
    """Wrap ``module`` for training over ``n_steps`` optimizer steps; it packs rows if that is exact."""
    options = config.supervised
    freeze_vision(module, options.freeze_vision_tower, options.freeze_connector)
    model = strategy.prepare(module, config.adam, options.learning_rate, total_steps=n_steps)
    if not isinstance(module, ProcessRewardModel):
        with strategy.uncompiled():
            pack_where_exact(module, model, strategy.device, name=role)

    # After the check above, whose tiny rows may hold placeholders.
    has_ranks = strategy.comm.world_size > 1
    if data.vision.kinds and has_ranks and isinstance(module, Actor | ScalarHeadModel):
        module.use_stand_in(data.vision.blank(data.vision.kinds))
    return model


def _estimate(
    config: Any, data: SupervisedData, sizes: dict[str, ModelSize], machine: Machine
) -> Estimate:
    """Estimate the memory of training on the longest rows of ``data``."""
    trainer_class = _TRAINERS[type(config)]
    packed = config.pack_to or 0
    examples = [*data.train, *data.held_out]
    patches = 0
    if data.vision.kinds:
        patches = max(n_patches(example.media, data.model_config) for example in examples)
    largest = Batch(
        rows=max(len(trainer_class.rows_of(example)) for example in examples),
        length=max(data.longest, packed),
        scored=max(packed, *map(trainer_class.n_scored, examples)),
        patches=patches,
    )
    (size,) = sizes.values()
    return estimate_supervised(config, largest, size, machine=machine)
