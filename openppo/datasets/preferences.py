"""Rows to pairs and rankings of responses, for reward models."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets.media import RowVision, has_media
from openppo.datasets.row_formats import PROMPT_COLUMNS, RowFields
from openppo.datasets.row_reader import Keys, RowReader
from openppo.datasets.sources import Row, ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.templates import TokenExample, as_messages, shortened
from openppo.datasets.turns import TRAINING_MARKS, render_response, render_whole
from openppo.media import Media


@dataclass(frozen=True)
class PreferenceExample:
    """Token ids of the better and the worse text, each with its prompt and ending with EOS, and the margin.

    A reward model reads its score at the last token, and a finished response of PPO ends with EOS too. ``media`` are
    those of the prompt.
    """

    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0
    media: Media = field(default=(), repr=False)

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of both sides."""
        return [self.chosen_ids, self.rejected_ids]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in ``texts`` of a better and a worse one."""
        return [(0, 1)]


@dataclass(frozen=True)
class RankingExample:
    """Token ids of several responses to a prompt, as of ``PreferenceExample``, and a score of each."""

    texts: list[list[int]]
    scores: list[float]
    media: Media = field(default=(), repr=False)
    margin = 0.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in ``texts`` of a better and a worse one: all pairs with different scores."""
        places = range(len(self.scores))
        return [(i, j) for i in places for j in places if self.scores[i] > self.scores[j]]


def load_preferences(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[PreferenceExample | RankingExample]:
    """One pair or ranking per row, in order, without those of which a side exceeds ``supervised.max_len`` tokens.

    The sides are responses to the row's prompt, whose images ``vision`` reads, or whole texts where it has none. With
    ``supervised.apply_chat_template`` they may be lists of messages: whole conversations, or the assistant's turns.
    Raises ``ValueError`` naming the data's flag and the row for a missing column, a malformed value, a margin or score
    that is not a number, and ``--max_len`` if nothing is left.
    """
    keys: Keys = {
        "chosen": (data.chosen_key, "--chosen_key"),
        "rejected": (data.rejected_key, "--rejected_key"),
    }
    named = [data.chosen_key, data.rejected_key] != [
        PreferenceConfig.chosen_key,
        PreferenceConfig.rejected_key,
    ]
    if data.responses_key is not None:
        named, keys = True, {"ranked": (data.responses_key, "--responses_key")}
        keys |= {} if data.scores_key is None else {"label": (data.scores_key, "--scores_key")}
    if data.prompt_key is not None:
        named, keys = True, {"prompt": (data.prompt_key, "--prompt_key"), **keys}
    keys = keys if named else {}  # a default does not count
    reader = RowReader(rows, "pairs", supervised, keys=keys, also=data.margin_key)

    def render(fields: RowFields) -> PreferenceExample | RankingExample:
        if fields.ranked is not None:
            return _ranked(fields, tokenizer, supervised, vision=vision)
        sides = fields.chosen, fields.rejected
        chosen, rejected = (
            _render_side(fields, side, tokenizer, options=supervised, vision=vision)
            for side in sides
        )
        return PreferenceExample(chosen.token_ids, rejected.token_ids, media=chosen.media)

    made = reader.make(
        render,
        lambda **of: (RankingExample if "texts" in of else PreferenceExample)(**of),
        show,
        tokenizer=tokenizer,
    )
    examples = []
    for row, example in zip(rows, made, strict=True):
        with naming_row(row):
            _refuse_null_prompt(reader.read(row), row.row, data.prompt_key)
            examples.append(
                example
                if data.margin_key is None
                else _with_margin(example, row.row, data.margin_key)
            )
    _log_equal(rows, examples)
    return reader.within(
        ("--max_len", supervised.max_len), examples, lambda example: max(map(len, example.texts))
    )


def _log_equal(
    rows: Sequence[SourceRow], examples: Sequence[PreferenceExample | RankingExample]
) -> None:
    """Count the rows in which a better response is the worse one too."""
    alike = [
        row
        for row, example in zip(rows, examples, strict=True)
        if any(example.texts[better] == example.texts[worse] for better, worse in example.pairs)
    ]
    if alike:
        place = f"row {alike[0].number} of {alike[0].source}"
        message = "%s: in %d of %d rows a better and a worse response are equal, which teaches nothing; first in %s"
        logger.warning(message, alike[0].flag, len(alike), len(rows), place)


def _refuse_null_prompt(fields: RowFields, row: Row, key: str | None) -> None:
    """Refuse texts beside a prompt that is null: they are no whole texts."""
    column = next((name for name in (key or "prompt", *PROMPT_COLUMNS) if descend(row, name)), "")
    are_texts = isinstance(fields.chosen, str) or fields.ranked is not None
    if fields.prompt is None and are_texts and descend(row, column) == [None]:
        raise ValueError(f"the prompt in column {column!r} is null. Correct or remove the row.")


def _with_margin(
    example: PreferenceExample | RankingExample, row: Row, key: str
) -> PreferenceExample:
    if isinstance(example, RankingExample):
        raise ValueError(
            "--margin_key is about pairs, and this row is a ranking. Leave the flag out."
        )
    value = value_of(row, key, "--margin_key")
    return replace(example, margin=_number(value, f"margin in column {key!r}", "drop --margin_key"))


def _ranked(
    fields: RowFields,
    tokenizer: PreTrainedTokenizerBase,
    options: SupervisedConfig,
    vision: RowVision | None,
) -> RankingExample:
    responses, scores = fields.ranked, fields.label
    if not isinstance(responses, list) or len(responses) < 2:
        raise ValueError(
            f"not a list of two responses or more: {shortened(responses)}. Correct or remove the row."
        )
    if scores is None:
        scores = [-place for place in range(len(responses))]
    if not isinstance(scores, list) or len(scores) != len(responses):
        raise ValueError(
            f"not one score for each of {len(responses)} responses: {shortened(scores)}. Correct the row."
        )
    sides = [
        _render_side(fields, response, tokenizer, options=options, vision=vision)
        for response in responses
    ]
    numbers = [_number(score, "score of a response", "remove the row") for score in scores]
    example = RankingExample([side.token_ids for side in sides], numbers, sides[0].media)
    if not example.pairs:
        raise ValueError("no response is better than another. Remove the row.")
    return example


def _render_side(
    fields: RowFields,
    side: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: SupervisedConfig,
    vision: RowVision | None,
) -> TokenExample:
    side = _without_marks(side)
    prompt, shown = fields.prompt, vision is not None and has_media(fields)
    if prompt is None and shown:
        raise ValueError(
            "images belong to a prompt: name its column with --prompt_key, or remove the row."
        )
    if prompt is None and options.input_template is not None:
        raise ValueError(
            "--input_template goes around a prompt: name its column with --prompt_key, or leave it out."
        )
    if prompt is None:
        return render_whole(side, tokenizer, options, tools=fields.tools)
    if (
        options.apply_chat_template
        and not isinstance(side, str)
        and as_messages(side)[0]["role"] != "assistant"
    ):
        raise ValueError("a whole conversation beside a prompt. Leave --prompt_key out.")

    def render(fields: RowFields) -> TokenExample:
        return render_response(prompt, side, tokenizer, options=options, tools=fields.tools)

    fields = replace(fields, response=side, conversation=None)
    return render(fields) if vision is None else vision.example(fields, render)


def _without_marks(side: Any) -> Any:
    """A side of which every turn is read: a score has no targets."""
    if isinstance(side, list):
        return [_without_marks(turn) for turn in side]
    if isinstance(side, dict):
        return {name: value for name, value in side.items() if name not in TRAINING_MARKS}
    return side


def _number(value: Any, what: str, otherwise: str) -> float:
    with suppress(ValueError, OverflowError):
        if (
            isinstance(value, (int, float, str))
            and not isinstance(value, bool)
            and math.isfinite(float(value))
        ):
            return float(value)
    raise ValueError(f"the {what} is not a number: {shortened(value)}. Correct it, or {otherwise}.")
