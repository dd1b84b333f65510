"""Rows -> pairs of a better and a worse text, for the reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets.formats import Row
from openppo.datasets.loading import naming_row, require_column
from openppo.datasets.sft import require_some_left, warn_of_bare_responses
from openppo.datasets.templates import (
    Message,
    RenderedExample,
    as_messages,
    render_response,
    render_whole,
    require_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreferenceExample:
    """Token ids of the better and the worse text, each with its prompt and ending with EOS, and the margin.

    A reward model reads its score at the last token, and a finished response of PPO ends with EOS too.
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0


def load_preferences(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    *,
    flag: str = "--dataset",
) -> tuple[list[PreferenceExample], int]:
    """One pair per row, in order, and the number of rows dropped because a side exceeds ``supervised.max_len`` tokens.

    With ``data.prompt_key`` the two columns hold responses to that prompt, else whole texts. With
    ``supervised.apply_chat_template`` they may be lists of messages: whole conversations, or the assistant's turns.
    Raises ``ValueError`` naming ``flag`` and the row for a missing column, a malformed value or a margin that is not a
    number, and ``--max_len`` if no pair is left.
    """
    require_tokenizer(tokenizer, apply_chat_template=supervised.apply_chat_template, eos=True)
    _require_columns(rows, data, flag)
    if data.prompt_key is None and supervised.input_template is not None:
        raise ValueError("--input_template goes around a prompt: name its column with --prompt_key, or leave it out.")

    examples, lengths, bare_rows = [], [], 0
    for number, row in enumerate(rows, start=1):
        with naming_row(flag, number):
            prompt = None if data.prompt_key is None else row[data.prompt_key]
            sides = [_render_side(prompt, row[key], tokenizer, supervised, data, key) for key in _side_keys(data)]
            margin = 0.0 if data.margin_key is None else _as_margin(row[data.margin_key], data.margin_key)
        chosen, rejected = (side.prompt_ids + side.response_ids for side in sides)
        bare_rows += not all(side.as_rendered for side in sides)
        lengths.append(max(len(chosen), len(rejected)))
        if lengths[-1] <= supervised.max_len:
            examples.append(PreferenceExample(chosen, rejected, margin))
    warn_of_bare_responses(bare_rows, flag)
    require_some_left(examples, lengths, supervised.max_len, flag)
    return examples, len(rows) - len(examples)


def _side_keys(data: PreferenceConfig) -> tuple[str, str]:
    return data.chosen_key, data.rejected_key


def _require_columns(rows: Sequence[Row], data: PreferenceConfig, flag: str) -> None:
    for option, key in (
        ("--prompt_key", data.prompt_key),
        ("--chosen_key", data.chosen_key),
        ("--rejected_key", data.rejected_key),
        ("--margin_key", data.margin_key),
    ):
        if key is not None:
            require_column(rows, key, flag_of_key=option, flag_of_data=flag)


def _render_side(
    prompt: object,
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    key: str,
) -> RenderedExample:
    template, chat = supervised.input_template, supervised.apply_chat_template
    try:
        if data.prompt_key is None:
            return RenderedExample([], render_whole(value, tokenizer, input_template=None, apply_chat_template=chat))
        if chat and not isinstance(value, str):
            value = _turns_after(as_messages(prompt, "user", template), as_messages(value))
        return render_response(prompt, value, tokenizer, input_template=template, apply_chat_template=chat)
    except ValueError as error:
        raise ValueError(f"column {key!r}: {error}") from error


def _turns_after(prompt: list[Message], turns: list[Message]) -> list[Message]:
    """``turns`` without the prompt, if they repeat it."""
    if turns[0]["role"] == "assistant":
        return turns
    if len(turns) > len(prompt) and all(
        (turn["role"], turn["content"]) == (message["role"], message["content"])
        for turn, message in zip(turns, prompt, strict=False)
    ):
        return turns[len(prompt) :]
    raise ValueError(
        "a whole conversation that does not start with the prompt. Leave --prompt_key out, so that the conversation "
        "is taken as it is."
    )


def _as_margin(value: object, key: str) -> float:
    try:
        margin = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"the margin in column {key!r} is not a number: {value!r}. Correct it, or drop --margin_key.")
    return margin
