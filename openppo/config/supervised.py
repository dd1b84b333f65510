"""Options of the supervised commands: train_sft, train_rm, train_prm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.data import RowsConfig, parse_probs
from openppo.config.fields import Options, at_least, not_empty, not_negative, option
from openppo.config.models import ModelConfig

_ROWS = ("dataset",)


@dataclass(frozen=True)
class SupervisedConfig(RowsConfig, ModelConfig):
    """What SFT, reward-model and process-reward-model training have in common."""

    dataset: str = option(place=True, resume="must match")
    """Training data: JSONL, JSON, CSV or Parquet files, folders of 'datasets', or hub names; several with commas."""
    dataset_probs: str | None = option(None, resume="must match", rows_of=_ROWS)
    """Shares in which several --dataset are mixed, with commas, until one is used up (default: all rows of all)."""
    dataset_split: str = option("train", resume="must match", rows_of=_ROWS)
    """Split of --dataset."""
    eval_dataset: str | None = option(None, place=True, measures=True)
    """Held-out data, in any format of --dataset."""
    eval_split: str = option("test", measures=True)
    """Split of --eval_dataset when it has splits."""
    eval_steps: int = option(-1, at_least(1, other=-1))
    """Evaluate every this many optimizer steps (-1: after each epoch)."""
    max_steps: int = option(-1, at_least(1, other=-1))
    """Stop after this many optimizer steps (-1: after --max_epochs)."""
    learning_rate: float = option(5e-6, not_negative)
    """Peak learning rate."""
    max_len: int = option(512, at_least(2), rows_of=_ROWS, measures=True)
    """Longer samples are dropped, with a count in the log."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        parse_probs(self.dataset, self.dataset_probs, "dataset")


@dataclass(frozen=True)
class SFTDataConfig(Options):
    """Columns of supervised fine-tuning data."""

    input_key: str | None = option(None, rows_of=_ROWS)
    """Column with the prompt (text or chat messages); no loss on it (default: recognized)."""
    output_key: str | None = option("output", rows_of=_ROWS)
    """Column with the response (default: recognized); 'None' trains on all tokens of --input_key."""


@dataclass(frozen=True)
class PreferenceConfig(Options):
    """Columns of preference data, and the loss on them."""

    prompt_key: str | None = option(None, rows_of=_ROWS)
    """Column with the prompt, when chosen and rejected do not contain it (default: recognized)."""
    chosen_key: str = option("chosen", rows_of=_ROWS)
    """Column with the better response."""
    rejected_key: str = option("rejected", rows_of=_ROWS)
    """Column with the worse response."""
    margin_key: str | None = option(None, rows_of=_ROWS)
    """Column with the margin by which chosen must win (only with --loss sigmoid)."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    value_head_prefix: str = option("score", resume="must match")
    """Name of the scalar head."""

    def problems(self) -> Iterator[str]:
        if self.margin_key is not None and self.loss != "sigmoid":
            yield "--margin_key works with --loss sigmoid only: log-exp has no margin."


@dataclass(frozen=True)
class ProcessConfig(Options):
    """Columns and tokens of process supervision: a judgement of each step of a solution."""

    input_key: str | None = option(None, rows_of=_ROWS)
    """Column with the solution, a placeholder token after each step (default: recognized)."""
    label_key: str | None = option(None, rows_of=_ROWS)
    """Column with the judgements: the same text with a reward token after each step, or a list with one per step."""
    placeholder_token: str = option("ки", not_empty, rows_of=_ROWS)
    """Token after each step at which the model is trained to judge it."""
    reward_tokens: tuple[str, ...] = option(("+", "-"), rows_of=_ROWS)
    """Tokens of the judgement, good first; soft labels are the probability of the first of two."""

    def problems(self) -> Iterator[str]:
        if not len(set(self.reward_tokens)) == len(self.reward_tokens) >= 2:
            yield f"--reward_tokens needs at least two different tokens, got {' '.join(self.reward_tokens)}."
