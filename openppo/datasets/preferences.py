"""Rows -> pairs and rankings of responses, for reward models."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets.file_formats import Row
from openppo.datasets.media import RowVision, has_media
from openppo.datasets.row_fields import RowFields
from openppo.datasets.row_formats import PROMPT_COLUMNS
from openppo.datasets.row_reader import Keys, RowReader
from openppo.datasets.sources import ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.templates import TokenExample, as_messages, shortened
from openppo.datasets.turns import TRAINING_MARKS, render_response, render_whole
from openppo.media import Media


@dataclass(frozen=True)
class PreferenceExample:
    """Token ids of the better and the worse text, each with its prompt and ending with EOS, and the margin.

    A reward model reads its score at the last token, and a finished response of PPO ends with EOS too. ``media``
    belong to the prompt.
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
    """Token ids of several responses to a prompt, encoded as in ``PreferenceExample``, and a score of each."""

    texts: list[list[int]]
    scores: list[float]
    media: Media = field(default=(), repr=False)
    margin = 0.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in ``texts`` of a better and a worse one: all pairs with different scores."""
        pairs = product(range(len(self.scores)), repeat=2)
        return [
            (better, worse) for better, worse in pairs if self.scores[better] > self.scores[worse]
        ]


def load_preferences(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: PreferenceConfig,
    show: ShowRows = iter,
    vision: RowVision | None = None,
) -> list[PreferenceExample | RankingExample]:
    """Load one pair or ranking per row, in order.

    Rows with a side above ``supervised.max_len`` tokens are dropped. The sides are responses to the row's prompt,
    whose images ``vision`` reads, or whole texts where it has none. With ``supervised.apply_chat_template`` they may
    be lists of messages: whole conversations, or the assistant's turns. Raises ``ValueError`` naming the data's flag
    and the row for a missing column, a malformed value, a margin or score that is not a number, and ``--max_len`` if
    nothing is left.
    """
    reader = RowReader(rows, "pairs", supervised, keys=_named_keys(data), also=data.margin_key)

    def render(fields: RowFields) -> PreferenceExample | RankingExample:
        if fields.ranked is not None:
            return _ranked(fields, tokenizer, supervised, vision=vision)
        chosen = _render_side(fields, fields.chosen, tokenizer, options=supervised, vision=vision)
        rejected = _render_side(
            fields, fields.rejected, tokenizer, options=supervised, vision=vision
        )
        return PreferenceExample(chosen.token_ids, rejected.token_ids, media=chosen.media)

    rendered = reader.make(render, _example, show, tokenizer=tokenizer)
    examples = []
    for row, example in zip(rows, rendered, strict=True):
        with naming_row(row):
            _refuse_null_prompt(reader.read(row), row.row, data.prompt_key)
            if data.margin_key is not None:
                example = _with_margin(example, row.row, data.margin_key)
            examples.append(example)
    _log_equal(rows, examples)
    return reader.within(("--max_len", supervised.max_len), examples, _length_of_longest)


def _length_of_longest(example: PreferenceExample | RankingExample) -> int:
    return max(map(len, example.texts))


def _named_keys(data: PreferenceConfig) -> Keys:
    """Columns that the user named; a default does not count."""
    keys = {}
    if data.prompt_key is not None:
        keys["prompt"] = (data.prompt_key, "--prompt_key")

    if data.responses_key is not None:
        keys["ranked"] = (data.responses_key, "--responses_key")
        if data.scores_key is not None:
            keys["label"] = (data.scores_key, "--scores_key")
        return keys

    defaults = (PreferenceConfig.chosen_key, PreferenceConfig.rejected_key)
    if keys or (data.chosen_key, data.rejected_key) != defaults:
        keys["chosen"] = (data.chosen_key, "--chosen_key")
        keys["rejected"] = (data.rejected_key, "--rejected_key")
    return keys


def _example(**attributes: Any) -> PreferenceExample | RankingExample:
    if "texts" in attributes:
        return RankingExample(**attributes)
    return PreferenceExample(**attributes)


def _log_equal(
    rows: Sequence[SourceRow], examples: Sequence[PreferenceExample | RankingExample]
) -> None:
    """Log the number of rows in which a better and a worse response are equal."""
    alike = []
    for row, example in zip(rows, examples, strict=True):
        texts = example.texts
        if any(texts[better] == texts[worse] for better, worse in example.pairs):
            alike.append(row)
    if not alike:
        return

    first = alike[0]
    logger.warning(
        "%s: in %d of %d rows a better and a worse response are equal, which teaches nothing; first in %s",
        first.flag,
        len(alike),
        len(rows),
        f"row {first.number} of {first.source}",
    )


def _refuse_null_prompt(fields: RowFields, row: Row, key: str | None) -> None:
    """Refuse texts beside a prompt that is null: they are no whole texts."""
    are_texts = isinstance(fields.chosen, str) or fields.ranked is not None
    if fields.prompt is not None or not are_texts:
        return
    names = (key or "prompt", *PROMPT_COLUMNS)
    column = next((name for name in names if descend(row, name)), "")
    if descend(row, column) == [None]:
        raise ValueError(f"the prompt in column {column!r} is null. Correct or remove the row.")


def _with_margin(
    example: PreferenceExample | RankingExample, row: Row, key: str
) -> PreferenceExample:
    if isinstance(example, RankingExample):
        raise ValueError(
            "--margin_key is about pairs, and this row is a ranking. Leave the flag out."
        )
    value = value_of(row, key, "--margin_key")
    margin = _number(value, f"margin in column {key!r}", "drop --margin_key")
    return replace(example, margin=margin)


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
    prompt = fields.prompt
    if prompt is None:
        if vision is not None and has_media(fields):
            raise ValueError(
                "images belong to a prompt: name its column with --prompt_key, or remove the row."
            )
        if options.input_template is not None:
            raise ValueError(
                "--input_template goes around a prompt: name its column with --prompt_key, or leave it out."
            )
        return render_whole(side, tokenizer, options, tools=fields.tools)

    if options.apply_chat_template and not isinstance(side, str):
        first = as_messages(side)[0]
        if first["role"] != "assistant":
            raise ValueError("a whole conversation beside a prompt. Leave --prompt_key out.")

    def render(fields: RowFields) -> TokenExample:
        return render_response(prompt, side, tokenizer, options=options, tools=fields.tools)

    fields = replace(fields, response=side, conversation=None)
    if vision is None:
        return render(fields)
    return vision.example(fields, render)


def _without_marks(side: Any) -> Any:
    """Remove marks for training from the turns of a side: all of it is scored."""
    if isinstance(side, list):
        return [_without_marks(turn) for turn in side]
    if isinstance(side, dict):
        return {name: value for name, value in side.items() if name not in TRAINING_MARKS}
    return side


def _number(value: Any, place: str, remedy: str) -> float:
    """Read a finite number; ``ValueError`` names its ``place`` and another ``remedy`` than to correct it."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError(f"the {place} is not a number: {shortened(value)}. Correct it, or {remedy}.")
