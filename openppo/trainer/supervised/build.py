"""From options to trainers of causal language models, reward models and process reward models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig, parse_probs
from openppo.config.commands import SupervisedCommand
from openppo.datasets import (
    ShowRows,
    SourceRow,
    load_mixed_rows,
    load_preferences,
    load_process_examples,
    load_sft_examples,
)
from openppo.models.actor import Actor
from openppo.models.loading import load_options, model_error_context
from openppo.models.loss import IGNORE_INDEX
from openppo.models.pretrained import check_model, check_token_ids, context_length, rescaled_positions
from openppo.models.scalar_head import ProcessRewardModel, ScalarHeadModel, get_llm_for_sequence_regression
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.memory import log_supervised_memory
from openppo.trainer.resume.checkpointer import Checkpointer
from openppo.trainer.resume.compatible import examples_fingerprint, model_fingerprint
from openppo.trainer.resume.stop import SignalStop
from openppo.trainer.startup import (
    check_options,
    check_same,
    load_policy_tokenizer,
    log_dropped,
    on_all_ranks,
    start_trackers,
    tokenizing,
)
from openppo.trainer.summary import log_supervised_start
from openppo.trainer.supervised.loop import SupervisedComponents, SupervisedTrainer, total_optimizer_steps
from openppo.trainer.supervised.process_reward import PRM_HEADLINE, ProcessRewardTrainer
from openppo.trainer.supervised.reward_model import RM_HEADLINE, RewardModelTrainer
from openppo.trainer.supervised.sft import SFT_HEADLINE, SFTTrainer
from openppo.types import Comm

Example = TypeVar("Example")
Trainer = TypeVar("Trainer", bound=SupervisedTrainer[Any])


class MakeExamples(Protocol[Example]):
    """Examples of rows, and how many rows were too long."""

    def __call__(self, rows: list[SourceRow], *, flag: str, show: ShowRows) -> tuple[list[Example], int]: ...


def build_sft_trainer(config: TrainSFTConfig, strategy: DeepspeedStrategy | None = None) -> SFTTrainer:
    """A trainer of a causal language model, ready for ``fit()``. ``ValueError`` names the flag of what cannot work."""
    strategy, options = strategy or DeepspeedStrategy(config.deepspeed), config.supervised
    tokenizer, model_config = _check_and_load_tokenizer(config, strategy)
    train, held_out = load_train_and_eval(
        config, strategy.comm, partial(load_sft_examples, tokenizer=tokenizer, supervised=options, data=config.data)
    )
    rows = [example.token_ids for example in [*train, *held_out]]
    _check_rows(config, rows, model_config, tokenizer)
    estimate = log_supervised_memory(config, False, rows, strategy)
    checkpointer = _checkpointer(config, strategy, "sft", train)
    actor = load_language_model(config)
    n_steps = total_optimizer_steps(config, len(train))
    engine = strategy.prepare(actor, config.adam, options.learning_rate, n_steps)
    checkpointer.attach({"model": engine})
    trackers = start_trackers(config, strategy, SFT_HEADLINE, n_steps, checkpointer.found_step)
    parts = SupervisedComponents(
        strategy, tokenizer, engine, train, held_out, trackers, checkpointer, SignalStop(strategy.comm), estimate
    )
    return _resumed(SFTTrainer(config, parts))


def build_rm_trainer(config: TrainRMConfig, strategy: DeepspeedStrategy | None = None) -> RewardModelTrainer:
    """A trainer of a reward model on preference pairs, ready for ``fit()``. Errors as in ``build_sft_trainer``."""
    strategy, options = strategy or DeepspeedStrategy(config.deepspeed), config.supervised
    tokenizer, model_config = _check_and_load_tokenizer(config, strategy)
    train, held_out = load_train_and_eval(
        config, strategy.comm, partial(load_preferences, tokenizer=tokenizer, supervised=options, data=config.data)
    )
    rows = [ids for pair in [*train, *held_out] for ids in (pair.chosen_ids, pair.rejected_ids)]
    _check_rows(config, rows, model_config, tokenizer)
    estimate = log_supervised_memory(config, True, rows, strategy, rows_per_sample=2)
    checkpointer = _checkpointer(config, strategy, "rm", train)
    model = load_reward_model(config, tokenizer)
    n_steps = total_optimizer_steps(config, len(train))
    engine = strategy.prepare(model, config.adam, options.learning_rate, n_steps)
    checkpointer.attach({"model": engine})
    trackers = start_trackers(config, strategy, RM_HEADLINE, n_steps, checkpointer.found_step)
    parts = SupervisedComponents(
        strategy, tokenizer, engine, train, held_out, trackers, checkpointer, SignalStop(strategy.comm), estimate
    )
    return _resumed(RewardModelTrainer(config, parts))


def build_prm_trainer(config: TrainPRMConfig, strategy: DeepspeedStrategy | None = None) -> ProcessRewardTrainer:
    """A trainer of a process reward model, ready for ``fit()``. Errors as in ``build_sft_trainer``."""
    strategy, options = strategy or DeepspeedStrategy(config.deepspeed), config.supervised
    tokenizer, model_config = _check_and_load_tokenizer(config, strategy)
    train, held_out = load_train_and_eval(
        config,
        strategy.comm,
        partial(load_process_examples, tokenizer=tokenizer, supervised=options, data=config.data),
    )
    examples = [*train, *held_out]
    most_steps = max(sum(label != IGNORE_INDEX for label in example.labels) for example in examples)
    rows = [example.token_ids for example in examples]
    _check_rows(config, rows, model_config, tokenizer)
    estimate = log_supervised_memory(config, False, rows, strategy, most_scored=most_steps)
    checkpointer = _checkpointer(config, strategy, "prm", train)
    actor = load_language_model(config)
    n_steps = total_optimizer_steps(config, len(train))
    engine = strategy.prepare(ProcessRewardModel(actor.model), config.adam, options.learning_rate, n_steps)
    checkpointer.attach({"model": engine})
    trackers = start_trackers(config, strategy, PRM_HEADLINE, n_steps, checkpointer.found_step)
    parts = SupervisedComponents(
        strategy, tokenizer, engine, train, held_out, trackers, checkpointer, SignalStop(strategy.comm), estimate
    )
    return _resumed(ProcessRewardTrainer(config, parts))


def load_language_model(config: SupervisedCommand) -> Actor:
    """Language model of train_sft and train_prm before training."""
    name = config.supervised.pretrain
    with model_error_context("--pretrain", name):
        return Actor(name, **_model_options(config))


def load_reward_model(config: TrainRMConfig, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    """Reward model of train_rm before training."""
    name, prefix = config.supervised.pretrain, config.data.value_head_prefix
    with model_error_context("--pretrain", name):
        model = get_llm_for_sequence_regression(
            name, "reward", value_head_prefix=prefix, init_value_head=True, **_model_options(config)
        )
    model.model.config.pad_token_id = tokenizer.pad_token_id  # plain transformers finds the score through it
    return model


def _checkpointer(
    config: SupervisedCommand, strategy: DeepspeedStrategy, kind: str, examples: Sequence[Any]
) -> Checkpointer:
    contents = {
        "--pretrain": model_fingerprint(config.supervised.pretrain),
        "--dataset": examples_fingerprint(examples),
    }
    return Checkpointer(config, strategy, kind, contents)


def _resumed(trainer: Trainer) -> Trainer:
    """The trainer, where its checkpoint left off if it goes on from one; and what it is going to do, as a log."""
    checkpointer = trainer.components.checkpointer
    assert checkpointer is not None, "the builders make one"
    if checkpointer.found is not None:
        trainer.load_checkpoint()
    else:
        checkpointer.set_aside_earlier()
    log_supervised_start(trainer)
    return trainer


def _check_and_load_tokenizer(
    config: SupervisedCommand, strategy: DeepspeedStrategy
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Check what needs neither data nor weights; tokenizer and config."""
    check_options(config, strategy.comm)
    options = config.supervised
    model_config = on_all_ranks(
        strategy.comm, lambda: check_model(options.pretrain, "--pretrain", options.trust_remote_code)
    )
    load_options(config.deepspeed.bf16, options.flash_attn, config.lora.load_in_4bit)
    tokenizer = load_policy_tokenizer(options.pretrain, options.trust_remote_code, options.chat_template_kwargs)
    return tokenizer, model_config


def _check_rows(
    config: SupervisedCommand,
    rows: Sequence[Sequence[int]],
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """``ValueError`` for rows that the model cannot read."""
    options, longest = config.supervised, max(map(len, rows))
    context, why = context_length(model_config), rescaled_positions(model_config)
    if context is not None and longest > context:
        raise ValueError(
            f"--max_len {options.max_len}: the longest row has {longest} tokens, and --pretrain {options.pretrain} "
            f"reads {context}. Lower --max_len to {context}: longer rows are left out.{why}"
        )
    check_token_ids(model_config, f"--pretrain {options.pretrain}", tokenizer, rows)


def _model_options(config: SupervisedCommand) -> dict[str, Any]:
    """How weights are loaded, and which are trained."""
    options = config.supervised
    return {
        "bf16": config.deepspeed.bf16,
        "flash_attn": options.flash_attn,
        "trust_remote_code": options.trust_remote_code,
        **vars(config.lora),
    }


def load_train_and_eval(
    config: SupervisedCommand, comm: Comm, make: MakeExamples[Example]
) -> tuple[list[Example], list[Example]]:
    """Training examples, and held-out ones (none without ``--eval_dataset``), the same on all ranks."""
    options = config.supervised

    def load(source: str, probs: str | None, flag: str, split: str) -> list[Example]:
        rows = load_mixed_rows(
            parse_probs(source, probs, flag.removeprefix("--")),
            flag=flag,
            split=split,
            max_samples=options.max_samples,
            seed=config.deepspeed.seed,
            dataset_class=options.dataset_class,
        )
        examples, dropped = make(rows, flag=flag, show=tokenizing(comm))
        log_dropped(dropped, len(examples), flag, "--max_len")
        return examples

    def load_all() -> tuple[list[Example], list[Example]]:
        train = load(options.dataset, options.dataset_probs, "--dataset", options.dataset_split)
        if options.eval_dataset is None:
            return train, []
        return train, load(options.eval_dataset, None, "--eval_dataset", options.eval_split)

    train, held_out = on_all_ranks(comm, load_all)
    check_same(comm, {"--dataset": train, "--eval_dataset": held_out})
    return train, held_out
