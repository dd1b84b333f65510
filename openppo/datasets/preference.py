"""Rows -> pairs of a better and a worse text, for the reward model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets.row_formats import Keys, RowFields, RowReader
from openppo.datasets.sources import Row, ShowRows, SourceRow, require_column
from openppo.datasets.templates import (
    Message,
    as_messages,
    render_whole,
    require_tokenizer,
    same_turn,
    shortened,
)
from openppo.datasets.turns import render_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceExample:
    """Token ids of the better and the worse text, each with its prompt and ending with EOS, and the margin.

    A reward model reads its score at the last token, and a finished response of PPO ends with EOS too.
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0


def load_preferences(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    *,
    flag: str = "--dataset",
    show: ShowRows = iter,
) -> tuple[list[PreferenceExample], int]:
    """One pair per row, in order, and the number of rows dropped because a side exceeds ``supervised.max_len`` tokens.

    The sides are responses to the row's prompt, or whole texts where it has none. With
    ``supervised.apply_chat_template`` they may be lists of messages: whole conversations, or the assistant's turns.
    Raises ``ValueError`` naming ``flag`` and the row for a missing column, a malformed value or a margin that is not a
    number, and ``--max_len`` if no pair is left.
    """
    chat = supervised.apply_chat_template
    require_tokenizer(tokenizer, apply_chat_template=chat, eos=True)
    reader = RowReader(rows, "pairs", flag, supervised, _named_keys(data))
    if data.margin_key is not None:
        require_column(rows, data.margin_key, flag_of_key="--margin_key", flag_of_data=flag)
    n_equal = 0

    def render(fields: RowFields, row: SourceRow) -> PreferenceExample:
        nonlocal n_equal
        if fields.prompt is None and isinstance(fields.chosen, str):
            _refuse_null_prompt(row.row, data)
        chosen = _render_side(fields.prompt, fields.chosen, tokenizer, supervised, data.chosen_key)
        rejected = _render_side(fields.prompt, fields.rejected, tokenizer, supervised, data.rejected_key)
        n_equal += chosen == rejected
        margin = 0.0 if data.margin_key is None else _as_margin(row.row[data.margin_key], data.margin_key)
        return PreferenceExample(chosen, rejected, margin)

    limit = "--max_len", supervised.max_len
    examples, dropped = reader.examples(
        render, lambda pair: max(len(pair.chosen_ids), len(pair.rejected_ids)), tokenizer, limit, show
    )
    if n_equal:
        logger.info("%s: in %d of %d pairs both sides are the same, which teaches nothing", flag, n_equal, len(rows))
    return examples, dropped


def _refuse_null_prompt(row: Row, data: PreferenceConfig) -> None:
    """Refuse a null prompt, without which the sides would be read as whole texts."""
    column = data.prompt_key or next((name for name in ("prompt", "question") if name in row), None)
    if column is not None and row[column] is None:
        raise ValueError(f"the prompt in column {column!r} is null. Correct or remove the row.")


def _named_keys(data: PreferenceConfig) -> Keys | None:
    """The columns that the user named; a default does not count."""
    sides = {"chosen": (data.chosen_key, "--chosen_key"), "rejected": (data.rejected_key, "--rejected_key")}
    if data.prompt_key is not None:
        return {"prompt": (data.prompt_key, "--prompt_key"), **sides}
    defaults = PreferenceConfig.chosen_key, PreferenceConfig.rejected_key
    return None if (data.chosen_key, data.rejected_key) == defaults else sides


def _render_side(
    prompt: Any, side: Any, tokenizer: PreTrainedTokenizerBase, supervised: SupervisedConfig, column: str
) -> list[int]:
    template, chat = supervised.input_template, supervised.apply_chat_template
    if prompt is None and template is not None:
        raise ValueError("--input_template goes around a prompt: name its column with --prompt_key, or leave it out.")
    try:
        if prompt is None:
            return render_whole(side, tokenizer, input_template=None, apply_chat_template=chat)
        if chat and not isinstance(side, str):
            side = _turns_after(as_messages(prompt, "user", template), as_messages(side))
        return render_response(prompt, side, tokenizer, input_template=template, apply_chat_template=chat).token_ids
    except ValueError as error:
        of_both = "" if prompt is None else " and its prompt"
        raise ValueError(f"column {column!r}{of_both}: {error}") from error


def _turns_after(prompt: list[Message], turns: list[Message]) -> list[Message]:
    """``turns`` without the prompt, if they repeat it."""
    if turns[0]["role"] == "assistant":
        return turns
    if len(turns) > len(prompt) and all(same_turn(turn, message) for turn, message in zip(turns, prompt, strict=False)):
        return turns[len(prompt) :]
    raise ValueError(
        "a whole conversation that does not start with the prompt. Leave --prompt_key out, so that the conversation "
        "is taken as it is."
    )


def _as_margin(value: object, key: str) -> float:
    try:
        margin = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(
            f"the margin in column {key!r} is not a number: {shortened(value)}. Correct it, or drop --margin_key."
        )
    return margin
