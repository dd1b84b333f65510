"""Options of data: rows, prompts, documents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from openppo.config.fields import Options, at_least, option, require

DataFormat = Literal[
    "auto", "plain", "messages", "sharegpt", "alpaca", "hh", "preference", "question_answer", "math_shepherd", "steps"
]

_PROMPTS = ("prompt_data",)
_DOCUMENTS = ("pretrain_data",)
_TEXTS = ("prompt_data", "dataset")
_ALL = ("prompt_data", "pretrain_data", "dataset")


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Options):
    """How rows become texts."""

    data_format: DataFormat = option("auto", resume="must match", rows_of=_TEXTS)
    """Format of the rows; 'auto' recognizes it by the columns unless options name them."""
    dataset_class: str | None = option(None, place=True, resume="must match", rows_of=_ALL)
    """Your own loader of the data sets, path.py:name: a class or function called with the source that gives rows."""
    input_template: str | None = option(None, rows_of=_TEXTS)
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = option(False, rows_of=_TEXTS)
    """Render prompts with the tokenizer's chat template."""
    chat_template_kwargs: str | None = option(None, rows_of=_TEXTS)
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}' (with --apply_chat_template)."""
    max_samples: int | None = option(None, at_least(1), resume="must match", rows_of=_ALL)
    """Use at most this many rows of each data set, from the start."""

    def problems(self) -> Iterator[str]:
        if self.input_template is not None and self.input_template.count("{}") != 1:
            yield f"--input_template must contain {{}} once, where the prompt goes; got {self.input_template!r}."
        if self.chat_template_kwargs is not None and not self.apply_chat_template:
            yield "--chat_template_kwargs has no effect without --apply_chat_template: add it."
        parse_template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True)
class PromptDataConfig(RowsConfig):
    """Prompts and their labels."""

    prompt_data: str = option(place=True, resume="must match")
    """Prompts, in any format of train_ppo; several sources with commas."""
    prompt_split: str = option("train", resume="must match", rows_of=_PROMPTS)
    """Split of --prompt_data when it has splits."""
    input_key: str | None = option(None, rows_of=_PROMPTS + _DOCUMENTS)
    """Column that holds the prompt: a text, or a list of chat messages (default: recognized)."""
    label_key: str | None = option(None, rows_of=_PROMPTS)
    """Column that is passed to the rewards as label (default: the answer of a recognized format)."""
    prompt_max_len: int = option(1024, at_least(1), rows_of=_PROMPTS, measures=True)
    """Prompts with more tokens are dropped, with a count in the log."""


@dataclass(frozen=True)
class PPODataConfig(PromptDataConfig):
    """Prompts, and documents for the PTX loss."""

    prompt_data: str = option("", place=True, resume="must match")
    """Prompts: JSONL, JSON, CSV or Parquet files, folders saved by 'datasets', or hub names; several with commas.
    Required, unless Python code gives a source of its own."""
    prompt_data_probs: str | None = option(None, resume="must match", rows_of=_PROMPTS)
    """Shares in which several --prompt_data are mixed, with commas, until one is used up (default: all rows of all)."""
    pretrain_data: str | None = option(None, place=True, resume="must match")
    """Documents for the PTX loss, in any format of --prompt_data (off when not given)."""
    pretrain_data_probs: str | None = option(None, resume="must match", rows_of=_DOCUMENTS)
    """Shares in which several --pretrain_data are mixed, with commas, until one is used up."""
    pretrain_split: str = option("train", resume="must match", rows_of=_DOCUMENTS)
    """Split of --pretrain_data."""
    pretrain_key: str | None = option(None, rows_of=_DOCUMENTS)
    """Column of --pretrain_data that holds the text (default: --input_key, else recognized)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.prompt_data:
            parse_probs(self.prompt_data, self.prompt_data_probs, "prompt_data")
        if self.pretrain_data is not None:
            parse_probs(self.pretrain_data, self.pretrain_data_probs, "pretrain_data")


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse ``--chat_template_kwargs``; ``ValueError`` for anything but a JSON object."""
    try:
        parsed = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        example = "'{\"enable_thinking\": false}'"
        raise ValueError(f"--chat_template_kwargs {text}: not a JSON object. In single quotes: {example}.")
    return parsed


def parse_probs(sources: str, probs: str | None, flag: str) -> list[tuple[str, float | None]]:
    """Split comma-separated sources and their shares, which are scaled to sum to 1 (None each without ``probs``)."""
    names = [name.strip() for name in sources.split(",")]
    require(all(names), f"--{flag} {sources!r} has an empty name between commas.")
    if probs is None:
        return [(name, None) for name in names]
    try:
        shares = [float(share) for share in probs.split(",")]
    except ValueError:
        shares = []
    fits = len(shares) == len(names) and all(0 < share < math.inf for share in shares)
    what = f"one positive number for each of the {len(names)} sources of --{flag}, with commas"
    require(fits, f"--{flag}_probs {probs!r}: give {what}.")
    return [(name, share / sum(shares)) for name, share in zip(names, shares, strict=True)]
