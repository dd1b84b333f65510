"""From options to trainers of causal language models, reward models and process reward models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.config.commands import SupervisedCommand
from openppo.datasets import (
    load_mixed_rows,
    load_preferences,
    load_process_examples,
    load_sft_examples,
)
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.models.actor import Actor
from openppo.models.loading import freeze_vision, load_options, model_error_context
from openppo.models.padding import pack_where_exact
from openppo.models.pretrained import check_model, check_token_ids, context_length
from openppo.models.scalar_head import (
    ProcessRewardModel,
    ScalarHeadModel,
    get_llm_for_sequence_regression,
)
from openppo.models.size import ModelSize
from openppo.models.vision_models import n_patches
from openppo.strategy.comm import check_same, collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.signals import SignalStop
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.memory.estimate import Estimate, Machine, estimate_supervised
from openppo.trainer.memory.sizing import log_memory
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.resume.edited_files import user_files
from openppo.trainer.startup import (
    check_options,
    load_policy_tokenizer,
    once_per_host,
    policy_vision,
    start_trackers,
    tokenizing,
)
from openppo.trainer.summary import log_supervised_start
from openppo.trainer.supervised.loop import (
    SupervisedComponents,
    SupervisedTrainer,
    total_optimizer_steps,
)
from openppo.trainer.supervised.trainers import ProcessRewardTrainer, RewardModelTrainer, SFTTrainer
from openppo.types import Comm

Example = TypeVar("Example")

_TRAINERS: dict[type, tuple[type[SupervisedTrainer[Any]], Callable[..., Any]]] = {
    TrainSFTConfig: (SFTTrainer, load_sft_examples),
    TrainRMConfig: (RewardModelTrainer, load_preferences),
    TrainPRMConfig: (ProcessRewardTrainer, load_process_examples),
}


def build_supervised_trainer(
    config: Any, strategy: DeepspeedStrategy | None = None
) -> SupervisedTrainer[Any]:
    """The trainer of a supervised command, ready for ``fit()``; ``ValueError`` names the flag to change."""
    strategy, options = strategy or DeepspeedStrategy(config.deepspeed), config.supervised
    trainer_class, _ = _TRAINERS[type(config)]
    comm = strategy.comm
    data = _load_data(config, strategy)
    role = "reward model" if isinstance(config, TrainRMConfig) else "model"
    estimate = log_memory(
        partial(_estimate, config, data),
        {role: ("--pretrain", options.pretrain)},
        config,
        strategy=strategy,
    )
    prints = {"--dataset": examples_fingerprint(data.train)}
    checkpointer = Checkpointer(
        config, strategy, trainer_class.kind, data=prints, user_files=user_files(config)
    )
    n_steps = total_optimizer_steps(config, len(data.train))
    with strategy.loading():
        module = load_model(config, data.tokenizer)
    freeze_vision(module, options.freeze_vision_tower, options.freeze_connector)
    model = strategy.prepare(module, config.adam, options.learning_rate, total_steps=n_steps)
    if not isinstance(module, ProcessRewardModel):
        with strategy.uncompiled():
            pack_where_exact(module, model, strategy.device, name=role)
    checkpointer.attach({"model": model})
    components = SupervisedComponents(
        strategy=strategy,
        tokenizer=data.tokenizer,
        model=model,
        train_examples=data.train,
        eval_examples=data.held_out,
        trackers=start_trackers(
            config,
            strategy,
            trainer_class.headline,
            total_steps=n_steps,
            resume_step=checkpointer.found_step,
        ),
        checkpointer=checkpointer,
        stop=SignalStop(comm),
        estimate=estimate,
    )
    trainer = trainer_class(config, components)
    if data.vision.kinds and comm.world_size > 1 and isinstance(module, Actor | ScalarHeadModel):
        module.stand_in = data.vision.blank(
            data.vision.kinds
        )  # after checks, whose rows may hold placeholders
    checkpointer.begin(trainer.load_checkpoint)
    log_supervised_start(trainer)
    return trainer


@dataclass(frozen=True)
class _Data:
    """Examples, within what the model reads, and what read them."""

    tokenizer: PreTrainedTokenizerBase
    model_config: PreTrainedConfig
    vision: RowVision
    train: list[Any]
    held_out: list[Any]
    longest: int
    """Tokens of the longest row."""


def _load_data(config: Any, strategy: DeepspeedStrategy) -> _Data:
    """Check options and model, and read the examples; ``ValueError`` names the flag to change."""
    options, comm = config.supervised, strategy.comm
    trainer_class, load_examples = _TRAINERS[type(config)]
    name, trust = options.pretrain, options.trust_remote_code
    check_options(config, comm)
    model_config = collective(comm, lambda: check_model(name, "--pretrain", trust))
    load_options(
        config.deepspeed.bf16, options.flash_attn, config.lora.load_in_4bit
    )  # what they need is installed
    tokenizer = load_policy_tokenizer(name, trust, options)
    make = partial(load_examples, tokenizer=tokenizer, supervised=options, data=config.data)
    vision = policy_vision(options, tokenizer, model_config, options=options)
    if not isinstance(config, TrainPRMConfig):
        make = partial(make, vision=vision)
    elif (
        key := "image_key" if options.image_key else "video_key" if options.video_key else None
    ) is not None:
        raise ValueError(f"--{key} is for train_sft, train_rm and train_ppo: leave it out.")
    train, held_out = load_train_and_eval(config, comm, make)
    if vision.kinds:
        check_images(model_config, f"--pretrain {name}")
        if config.pack_to is not None:
            raise ValueError(
                "--packing puts samples without images into a row, and these have some: leave it out."
            )
    longest = _check_rows(
        config, trainer_class, [*train, *held_out], tokenizer=tokenizer, model_config=model_config
    )
    return _Data(tokenizer, model_config, vision, train=train, held_out=held_out, longest=longest)


def _estimate(config: Any, data: _Data, sizes: dict[str, ModelSize], machine: Machine) -> Estimate:
    trainer_class, _ = _TRAINERS[type(config)]
    examples = [*data.train, *data.held_out]
    with_images = examples if data.vision.kinds else []
    return estimate_supervised(
        config,
        longest=max(data.longest, config.pack_to or 0),
        rows=max(len(trainer_class.rows_of(example)) for example in examples),
        scored=max(config.pack_to or 0, *map(trainer_class.n_scored, examples)),
        patches=max(
            (n_patches(example.media, data.model_config) for example in with_images), default=0
        ),
        sizes=sizes,
        machine=machine,
    )


def _check_rows(
    config: Any,
    trainer_class: type[SupervisedTrainer[Any]],
    examples: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
) -> int:
    """Tokens of the longest row; ``ValueError`` if the model cannot read it, or an id."""
    options, name = config.supervised, config.supervised.pretrain
    rows = [row for example in examples for row in trainer_class.rows_of(example)]
    longest, context = max(map(len, rows)), context_length(model_config)
    if context is not None and longest > context:
        raise ValueError(
            f"--max_len {options.max_len}: the longest row has {longest} tokens, and --pretrain {name} reads "
            f"{context}. Lower --max_len to {context}: longer rows are left out."
        )
    check_token_ids(model_config, f"--pretrain {name}", tokenizer, rows=rows)
    return longest


def load_model(config: Any, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The model of a supervised command before training."""
    options = config.supervised
    given = {"bf16": config.deepspeed.bf16, "flash_attn": options.flash_attn, **vars(config.lora)}
    given["trust_remote_code"] = options.trust_remote_code
    with model_error_context("--pretrain", options.pretrain):
        if not isinstance(config, TrainRMConfig):
            actor = Actor(options.pretrain, **given)
            return ProcessRewardModel(actor.model) if isinstance(config, TrainPRMConfig) else actor
        given |= {"value_head_prefix": config.data.value_head_prefix, "init_value_head": True}
        model = get_llm_for_sequence_regression(options.pretrain, "reward", **given)
    model.model.config.pad_token_id = (
        tokenizer.pad_token_id
    )  # plain transformers finds the score through it
    return model


def load_train_and_eval(
    config: SupervisedCommand, comm: Comm, make: Callable[..., list[Example]]
) -> tuple[list[Example], list[Example]]:
    """Training examples, and held-out ones (none without ``--eval_dataset``), the same on all ranks.

    ``make(rows, show=...)`` gives examples of rows.
    """
    options, seed = config.supervised, config.deepspeed.seed

    def load(flag: str, source: str | None, probs: str | None, split: str) -> list[Example]:
        if source is None:
            return []
        rows = load_mixed_rows(options, source, probs, flag=flag, split=split, seed=seed)
        return make(rows, show=tokenizing(comm))

    given = "--dataset", options.dataset, options.dataset_probs, options.dataset_split
    held_out_given = "--eval_dataset", options.eval_dataset, None, options.eval_split
    train, held_out = (
        once_per_host(comm, options, partial(load, *each)) for each in (given, held_out_given)
    )
    check_same(comm, {"--dataset": train, "--eval_dataset": held_out})
    return train, held_out
