"""Data of supervised training: examples, checked against the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.adapters import check_adapters
from openppo.build.checks.options import check_options
from openppo.build.policy_inputs import load_policy_tokenizer, policy_vision
from openppo.build.row_loading import once_per_host, tokenizing
from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.config.data import SupervisedConfig
from openppo.config.train_supervised import SupervisedCommand
from openppo.datasets import (
    load_mixed_rows,
    load_preferences,
    load_process_examples,
    load_sft_examples,
)
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.models.loading import load_options
from openppo.models.pretrained import check_model, check_token_ids, context_length
from openppo.strategy.comm import check_same, collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.supervised.loop import SupervisedTrainer
from openppo.types import Comm

Example = TypeVar("Example")

_LOADERS: dict[type, Callable[..., list[Any]]] = {
    TrainSFTConfig: load_sft_examples,
    TrainRMConfig: load_preferences,
    TrainPRMConfig: load_process_examples,
}
"""Functions that make examples of rows, by the config of the command."""


@dataclass(frozen=True)
class SupervisedData:
    """Examples, and the tokenizer and image reader that made them."""

    tokenizer: PreTrainedTokenizerBase
    model_config: PreTrainedConfig
    vision: RowVision
    train: list[Any]
    held_out: list[Any]
    longest: int
    """Tokens of the longest row."""

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of examples by flag; "held out" for all that is evaluated."""
        n_held_out = len(self.held_out)
        counts = {"--dataset": len(self.train), "--eval_dataset": n_held_out}
        return counts | {"held out": n_held_out}


def load_supervised_data(
    config: Any, strategy: DeepspeedStrategy, trainer_class: type[SupervisedTrainer[Any]]
) -> SupervisedData:
    """Check options and model, and load the examples; ``ValueError`` names the flag to change."""
    options = config.supervised
    comm = strategy.comm
    name = options.pretrain
    trust = options.trust_remote_code

    check_options(config, comm)
    model_config = collective(comm, lambda: check_model(name, "--pretrain", trust))
    # Raises if a library that these options need is not installed.
    load_options(config.deepspeed.bf16, options.flash_attn, config.lora.load_in_4bit)
    check_adapters(
        config.lora,
        comm,
        "SEQ_CLS" if isinstance(config, TrainRMConfig) else "CAUSAL_LM",
        pretrain=name,
        config=model_config,
        trust_remote_code=trust,
    )
    tokenizer = load_policy_tokenizer(name, trust, options)

    vision = policy_vision(options, tokenizer, model_config, options=options)
    make = partial(
        _LOADERS[type(config)], tokenizer=tokenizer, supervised=options, data=config.data
    )
    if isinstance(config, TrainPRMConfig):
        _refuse_images(options)
    else:
        make = partial(make, vision=vision)
    train, held_out = load_train_and_eval(config, comm, make)

    if vision.kinds:
        check_images(model_config, f"--pretrain {name}")
        if config.pack_to is not None:
            raise ValueError(
                "--packing puts samples without images into a row, and these have some: leave it out."
            )
    examples = [*train, *held_out]
    rows = [row for example in examples for row in trainer_class.rows_of(example)]
    longest = _check_rows(config, rows, tokenizer=tokenizer, model_config=model_config)
    return SupervisedData(
        tokenizer,
        model_config,
        vision,
        train=train,
        held_out=held_out,
        longest=longest,
    )


def _refuse_images(options: SupervisedConfig) -> None:
    """Raise ``ValueError`` for a column of images or videos."""
    for key, column in (("image_key", options.image_key), ("video_key", options.video_key)):
        if column:
            raise ValueError(f"--{key} is for train_sft, train_rm and train_ppo: leave it out.")


def _check_rows(
    config: Any,
    rows: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
) -> int:
    """Return the tokens of the longest row; raise ``ValueError`` if the model cannot read one."""
    options = config.supervised
    name = options.pretrain
    longest = max(map(len, rows))
    context = context_length(model_config)
    if context is not None and longest > context:
        raise ValueError(
            f"--max_len {options.max_len}: the longest row has {longest} tokens, and --pretrain {name} reads "
            f"{context}. Lower --max_len to {context}: longer rows are left out."
        )
    check_token_ids(model_config, f"--pretrain {name}", tokenizer, rows=rows)
    return longest


def load_train_and_eval(
    config: SupervisedCommand, comm: Comm, make: Callable[..., list[Example]]
) -> tuple[list[Example], list[Example]]:
    """Load training and held-out examples, the same on all ranks.

    Without ``--eval_dataset`` none are held out. ``make(rows, show=...)`` makes examples of rows.
    """
    options = config.supervised

    def load(flag: str, source: str | None, probs: str | None, split: str) -> list[Example]:
        if source is None:
            return []
        seed = config.deepspeed.seed
        rows = load_mixed_rows(options, source, probs, flag=flag, split=split, seed=seed)
        return make(rows, show=tokenizing(comm))

    load_train = partial(
        load, "--dataset", options.dataset, options.dataset_probs, split=options.dataset_split
    )
    load_held_out = partial(
        load, "--eval_dataset", options.eval_dataset, None, split=options.eval_split
    )
    train = once_per_host(comm, options, load_train)
    held_out = once_per_host(comm, options, load_held_out)
    check_same(comm, {"--dataset": train, "--eval_dataset": held_out})
    return train, held_out
