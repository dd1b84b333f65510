"""Options of data: rows, prompts, documents; for supervised commands all other options, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from openppo.config.fields import (
    NUMBER,
    Options,
    at_least,
    not_empty,
    not_negative,
    option,
    positive,
    require,
)
from openppo.config.models import ModelConfig, VisionConfig

DataFormat = Literal[
    "auto",
    "plain",
    "messages",
    "sharegpt",
    "alpaca",
    "hh",
    "preference",
    "ranking",
    "question_answer",
    "verl",
    "math_shepherd",
    "steps",
]

Truncation = Literal["drop", "left", "right", "middle", "error"]

_PROMPTS = ("prompt_data",)
_DOCUMENTS = ("pretrain_data",)
_ROWS = ("dataset",)
_TEXTS = ("prompt_data", "dataset")
_ALL = ("prompt_data", "pretrain_data", "dataset")


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Options):
    """Conversion of rows into texts."""

    data_format: DataFormat = option("auto", resume="must match", rows_of=_TEXTS)
    """Format of the rows; 'auto' recognizes it by the columns unless options name them."""
    dataset_class: str | None = option(None, place=True, resume="must match", rows_of=_ALL)
    """Your own loader of the data sets, path.py:name: a class or function called with the source that gives rows."""
    input_template: str | None = option(None, rows_of=_TEXTS)
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = option(False, rows_of=_TEXTS)
    """Render prompts with the tokenizer's chat template."""
    chat_template: str | None = option(
        None, place=True, rows_of=_TEXTS, needs="apply_chat_template"
    )
    """Jinja file that replaces the tokenizer's chat template, and is saved with it (with --apply_chat_template)."""
    chat_template_kwargs: str | None = option(None, rows_of=_TEXTS, needs="apply_chat_template")
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}' (with --apply_chat_template)."""
    tools_key: str | None = option(None, rows_of=_TEXTS, needs="apply_chat_template")
    """Column with schemas of tools for the chat template: a list, or its JSON text (with --apply_chat_template)."""
    image_key: str | None = option(None, rows_of=_TEXTS)
    """Column with the images of a prompt, one for each <image> in its text.
    An image is a path, bytes, base64, or an image of 'datasets'."""
    video_key: str | None = option(None, rows_of=_TEXTS)
    """Column with the videos of a prompt, one for each <video> in its text.
    A video is a file as for images, or a list of frames."""
    min_pixels: int | None = option(None, at_least(1), rows_of=_TEXTS, of_files=True)
    """Smaller images and frames are enlarged to this number of pixels."""
    max_pixels: int | None = option(None, at_least(1), rows_of=_TEXTS)
    """Larger images and frames are reduced to this number of pixels."""
    video_fps: float = option(2.0, positive, rows_of=_TEXTS, of_files=True)
    """Frames to read from each second of a video; for a list of frames, their number per second."""
    max_frames: int = option(32, at_least(1), rows_of=_TEXTS, of_files=True)
    """Largest number of frames to read from a video; those of a longer one are spaced further apart."""
    dataset_num_proc: int = option(0, not_negative)
    """Processes that tokenize, once for all ranks, kept in the cache of 'datasets' (0: every rank by itself)."""
    max_samples: int | None = option(None, at_least(1), resume="must match", rows_of=_ALL)
    """Use at most this many rows of each data set, from the start."""

    def problems(self) -> Iterator[str]:
        if self.input_template is not None and self.input_template.count("{}") != 1:
            yield f"--input_template must contain {{}} once, where the prompt goes; got {self.input_template!r}."
        for name in ("image_key", "video_key"):
            if vars(self)[name] is not None and self.dataset_num_proc > 0:
                yield f"--dataset_num_proc keeps texts, no images: leave it out with --{name}."
        low = self.min_pixels
        high = self.max_pixels
        if low is not None and high is not None and low > high:
            yield f"min_pixels {low} is above --max_pixels {high}: lower it."
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
    """Largest number of tokens in a prompt."""
    prompt_truncation: Truncation = option("drop", rows_of=_PROMPTS, measures=True)
    """Longer prompts are dropped, lose tokens on the left, the right or in the middle, or are an error."""

    def unread_by_agents(self) -> Iterator[str]:
        """Yield messages about options that change token ids alone: agents read the rows and messages."""
        if self.prompt_truncation in ("left", "right", "middle"):
            yield f"--prompt_truncation {self.prompt_truncation} cuts no conversation of agents: use drop or error."
        if self.tools_key is not None:
            yield "--tools_key offers what no agent can run: leave it out, or name a file of --tools instead."


@dataclass(frozen=True)
class PPODataConfig(PromptDataConfig):
    """Prompts, and documents for the PTX loss."""

    prompt_data: str = option("", place=True, resume="must match")
    """Prompts (required): JSONL, JSON, CSV, Parquet files, folders of 'datasets', hub names; several with commas."""
    prompt_data_probs: str | None = option(None, resume="must match", rows_of=_PROMPTS)
    """Shares in which several --prompt_data are mixed, with commas, until one is used up (default: all rows of all)."""
    pretrain_data: str | None = option(None, place=True, resume="must match")
    """Documents for the PTX loss, in any format of --prompt_data (off when not given)."""
    pretrain_data_probs: str | None = option(None, resume="must match", rows_of=_DOCUMENTS)
    """Shares in which several --pretrain_data are mixed, with commas, until one is used up."""
    pretrain_split: str = option("train", resume="must match", rows_of=_DOCUMENTS)
    """Split of --pretrain_data."""
    pretrain_key: str | None = option(None, rows_of=_DOCUMENTS, of_files=True)
    """Column of --pretrain_data that holds the text (default: --input_key, else recognized)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.prompt_data:
            parse_probs(self.prompt_data, self.prompt_data_probs, "prompt_data")
        if self.pretrain_data is not None:
            parse_probs(self.pretrain_data, self.pretrain_data_probs, "pretrain_data")


@dataclass(frozen=True)
class SupervisedConfig(RowsConfig, ModelConfig, VisionConfig):
    """Common options of SFT, reward-model and process-reward-model training."""

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
    packing: bool = False
    """Fill rows of --max_len tokens with several samples, which stay apart: the same loss with less padding."""


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
    """Column with the margin by which chosen must win."""
    responses_key: str | None = option(None, rows_of=_ROWS)
    """Column with a ranking instead of a pair: a list of responses, the best first (default: recognized)."""
    scores_key: str | None = option(None, rows_of=_ROWS, needs="responses_key")
    """Column with a number for each response of --responses_key, larger for a better one (default: none)."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    value_head_prefix: str = option("score", resume="must match", of_files=True)
    """Name of the scalar head."""

    def problems(self) -> Iterator[str]:
        if self.responses_key is not None and self.margin_key is not None:
            yield "--margin_key is about pairs, and --responses_key names rankings: leave one of them out."


@dataclass(frozen=True)
class ProcessConfig(Options):
    """Columns and tokens of process supervision: a judgement of each step of a solution."""

    input_key: str | None = option(None, rows_of=_ROWS)
    """Column with the solution, a placeholder token after each step (default: recognized)."""
    label_key: str | None = option(None, rows_of=_ROWS)
    """Column with the judgements, one per step: a list, or the same text with a reward token after each step."""
    placeholder_token: str = option("ки", not_empty, rows_of=_ROWS)
    """Token after each step at which the model is trained to judge it."""
    reward_tokens: tuple[str, ...] = option(("+", "-"), rows_of=_ROWS)
    """Tokens of the judgement, good first; soft labels are the probability of the first of two."""

    def problems(self) -> Iterator[str]:
        are_different = len(set(self.reward_tokens)) == len(self.reward_tokens)
        if len(self.reward_tokens) < 2 or not are_different:
            yield f"--reward_tokens needs at least two different tokens, got {' '.join(self.reward_tokens)}."


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse ``--chat_template_kwargs``; ``ValueError`` for anything but a JSON object."""
    try:
        parsed = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        example = "'{\"enable_thinking\": false}'"
        raise ValueError(
            f"--chat_template_kwargs {text}: not a JSON object. In single quotes: {example}."
        )
    return parsed


def parse_probs(sources: str, probs: str | None, flag: str) -> list[tuple[str, float | None]]:
    """Split comma-separated sources and their shares, which are scaled to sum to 1 (None each without ``probs``)."""
    names = [name.strip() for name in sources.split(",")]
    require(all(names), f"--{flag} {sources!r} has an empty name between commas.")
    if probs is None:
        return [(name, None) for name in names]

    shares = []
    for text in probs.split(","):
        is_number = re.fullmatch(rf"\s*{NUMBER}\s*", text)
        shares.append(float(text) if is_number else 0.0)
    if len(shares) != len(names) or min(shares) <= 0:
        raise ValueError(
            f"--{flag}_probs {probs!r}: give one positive number for each of the {len(names)} sources of --{flag}, "
            "with commas."
        )

    total = sum(shares)
    return [(name, share / total) for name, share in zip(names, shares, strict=True)]
