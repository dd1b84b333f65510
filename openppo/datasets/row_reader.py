"""Rows of one data flag -> their fields and examples: by columns that options name, or in a recognized format."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config.data import RowsConfig
from openppo.config.fields import NUMBER
from openppo.datasets.file_formats import Row
from openppo.datasets.row_fields import RowFields
from openppo.datasets.row_formats import (
    PROMPT_COLUMNS,
    ROW_FORMATS,
    RowFormat,
    RowPurpose,
    kto_column,
    with_system,
)
from openppo.datasets.sources import ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.template_checks import name_rendered
from openppo.datasets.templates import read_tools
from openppo.datasets.tokenization import to_json, tokenize, tokenizing_content

T = TypeVar("T")
Keys = Mapping[str, tuple[str, str]]
"""Columns that the user named: by field the column and its flag."""

KEY_FLAGS: Mapping[RowPurpose, str] = {
    "prompts": "--input_key",
    "sft": "--input_key and --output_key",
    "pairs": "--chosen_key and --rejected_key",
    "steps": "--input_key and --label_key",
    "documents": "pretrain_key",
}
"""Flags that name the columns of a task."""


class ColumnsRead(dict[str, Any]):
    """A row that remembers which of its columns were read."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    @property
    def unread(self) -> dict[str, Any]:
        """Columns that hold something and were not read."""
        unread = {name: value for name, value in self.items() if name not in self.read}
        return {name: value for name, value in unread.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


class RowReader:
    """Reader of the rows of one data flag.

    It reads columns ``keys``, or the format of the first row of each source. ``options`` name that format, or 'auto'
    recognizes it; it is logged once for each source, with its columns. Column ``also`` is read by the caller. Raises
    ``ValueError`` naming the flag and the columns if no format fits.
    """

    def __init__(
        self,
        rows: Sequence[SourceRow],
        task: RowPurpose,
        options: RowsConfig,
        keys: Keys | None = None,
        also: str | None = None,
    ) -> None:
        self.rows = rows
        self.task = task
        self.options = options
        self.keys = keys or {}
        self.also = also or ""

        media_keys = {"image": options.image_key, "video": options.video_key}
        self.media_keys = {kind: key for kind, key in media_keys.items() if key is not None}
        self.media_kinds = {kind for kind, key in self.media_keys.items() if _some_have(rows, key)}

        self.formats: dict[str, RowFormat] = {}
        # By source: columns so far that hold something and are not read.
        self.unread: dict[str, Row] = {}

        if self.keys:
            self._refuse_format_beside_keys()
        else:
            candidates = self._possible_formats()
            for row in rows:
                if row.source not in self.formats:
                    self.formats[row.source] = self._recognize(row, candidates)
        if task == "sft":
            self.rows = _without_bad_answers(rows)

    def _refuse_format_beside_keys(self) -> None:
        name = self.options.data_format
        if name not in ("auto", "plain"):
            flags = " and ".join(flag for _, flag in self.keys.values())
            raise ValueError(
                f"--data_format {name} knows its columns, and {flags} names others: leave one out."
            )

    def _possible_formats(self) -> list[RowFormat]:
        """Formats of the task, or the one of them that ``--data_format`` names."""
        name = self.options.data_format
        possible = [row_format for row_format in ROW_FORMATS if self.task in row_format.needs]
        if name == "auto":
            return possible
        candidates = [row_format for row_format in possible if row_format.name == name]
        if not candidates:
            others = ", ".join(sorted({row_format.name for row_format in possible}))
            raise ValueError(f"--data_format {name} is not for this command: use {others}.")
        return candidates

    def read(self, row: SourceRow) -> RowFields:
        """Return the fields of ``row``. Raises ``ValueError`` for malformed values and missing columns."""
        columns = ColumnsRead(row.row)

        tools = None
        tools_key = self.options.tools_key
        if tools_key is not None:
            tools = read_tools(value_of(columns, tools_key, "--tools_key"), tools_key)
        fields = replace(self._fields(row, columns), tools=tools)

        media = {}
        for kind, key in self.media_keys.items():
            may_lack = kind in self.media_kinds or row.flag.startswith("--eval")
            if descend(columns, key) or not may_lack:
                media[kind] = value_of(columns, key, f"--{kind}_key")

        # Columns that others read count as read.
        rating = kto_column(row.row) if self.task == "sft" else ""
        for name in (self.also, rating):
            descend(columns, name)

        self._require_prompt(fields, columns.unread)
        self.unread.setdefault(_place(row), {}).update(columns.unread)
        return replace(fields, media=media, source=row.source)

    def _fields(self, row: SourceRow, columns: ColumnsRead) -> RowFields:
        if self.keys:
            values = {name: value_of(columns, key, flag) for name, (key, flag) in self.keys.items()}
            return RowFields(**values)

        row_format = self.formats[row.source]
        if not row_format.columns_of(row.row, self.task):
            raise ValueError(
                f"not of format {row_format.describe(self.task)}, with which its source starts. {self._remedy(row)}."
            )
        chat = self.options.apply_chat_template
        return with_system(row_format.read(columns, chat), columns, chat)

    def _require_prompt(self, fields: RowFields, unread: Row) -> None:
        """Refuse a row without prompt beside a text that is not read and may be it."""
        texts = [name for name, value in unread.items() if _has_text(value)]
        remedy = ""
        if self.task == "pairs":
            if self.options.data_format == "auto" and not _has_prompt(fields):
                name = "plain" if self.keys else "preference"
                remedy = f"Name the prompt with --prompt_key, or add --data_format {name} if the responses hold it"
        elif self.task == "sft" and not self.keys and fields.whole is not None:
            texts = [name for name in texts if name in PROMPT_COLUMNS]
            remedy = "Name the columns with --input_key and --output_key"

        if texts and remedy:
            raise ValueError(f"no prompt, and column {texts[0]!r} is not read. {remedy}.")

    def make(
        self,
        render: Callable[[RowFields], T],
        kind: Callable[..., T],
        show: ShowRows,
        tokenizer: PreTrainedTokenizerBase,
        settings: object = None,
    ) -> list[T]:
        """Render each row to an example, in order.

        A ``ValueError`` of ``render`` is raised again with the flag of the data and the row. With
        ``--dataset_num_proc`` other processes make the attributes of ``kind``, or the cache of an earlier run has them.
        ``render`` depends on ``tokenizer``, options of templates and ``settings``.
        """
        if self.options.dataset_num_proc == 0:
            return self._make_here(render, show, tokenizer)

        contents = []
        prompts = []
        for row in self.rows:
            with naming_row(row):
                fields = self.read(row)
                contents.append(to_json(fields))
            prompts.append(fields.prompt)
        self._log_rows(prompts, tokenizer)

        rendered = tokenize(
            render,
            contents,
            self._tokenizing_content(tokenizer, settings),
            processes=self.options.dataset_num_proc,
            show=show,
        )
        examples = []
        for row, attributes in zip(self.rows, rendered, strict=True):
            with naming_row(row):
                if isinstance(attributes, str):
                    raise ValueError(attributes)
                examples.append(kind(**attributes))
        return examples

    def _make_here(
        self,
        render: Callable[[RowFields], T],
        show: ShowRows,
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[T]:
        examples = []
        prompts = []
        for row in show(self.rows):
            with naming_row(row):
                fields = self.read(row)
                examples.append(render(fields))
            prompts.append(fields.prompt)
        self._log_rows(prompts, tokenizer)
        return examples

    def _tokenizing_content(self, tokenizer: PreTrainedTokenizerBase, settings: object) -> str:
        options = [
            self.task,
            self.options.apply_chat_template,
            self.options.input_template,
            self.options.chat_template_kwargs,
            settings,
        ]
        return tokenizing_content(tokenizer, options)

    def within(
        self,
        limit: tuple[str, int],
        examples: Sequence[T],
        length: Callable[[Any], int] = lambda example: len(example.token_ids),
    ) -> list[T]:
        """Keep the ``examples`` up to ``limit``, a flag and its tokens; ``ValueError`` if none is left."""
        limit_flag, max_len = limit
        flag = self.rows[0].flag
        kept = [example for example in examples if length(example) <= max_len]
        if not kept:
            shortest = min(map(length, examples))
            raise ValueError(
                f"{flag}: all {len(examples)} rows are longer than {limit_flag} {max_len}; the shortest has "
                f"{shortest} tokens. Raise {limit_flag}."
            )

        n_dropped = len(examples) - len(kept)
        if n_dropped:
            logger.info(
                "%s: %d rows longer than %s were dropped, %d are kept",
                flag,
                n_dropped,
                limit_flag,
                len(kept),
            )
        return kept

    def _log_rows(self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
        """Log the columns that are not read, and prompts that a chat template has written already."""
        readers = " (rewards and agents may read them)" if self.task == "prompts" else ""
        for place, columns in self.unread.items():
            if columns:
                names = ", ".join(map(str, columns))
                logger.info("%s: columns not read: %s%s", place, names, readers)
        if self.options.apply_chat_template:
            name_rendered(prompts, tokenizer, self.rows[0].flag)

    def _recognize(self, row: SourceRow, candidates: Sequence[RowFormat]) -> RowFormat:
        place = _place(row)
        for candidate in candidates:
            columns = candidate.columns_of(row.row, self.task)
            if columns:
                logger.info(
                    "%s: rows are read as %s, by their columns %s",
                    place,
                    candidate.name,
                    ", ".join(columns),
                )
                return candidate

        problem = "have no known format"
        if len({candidate.name for candidate in candidates}) == 1:
            problem = f"are not of format {candidates[0].describe(self.task)}"
        raise ValueError(f"{place}: its rows {problem}. {self._remedy(row)}.")

    def _remedy(self, row: SourceRow) -> str:
        columns = ", ".join(map(str, row.row))
        others = "" if self.task == "documents" else ", or the format with --data_format"
        return f"Its columns are {columns}: name them with {KEY_FLAGS[self.task]}{others}"


def _place(row: SourceRow) -> str:
    """Flag and name of the source of a row."""
    return f"{row.flag} {row.source}".strip()


def _some_have(rows: Sequence[SourceRow], key: str) -> bool:
    """True if column ``key`` is in some of the rows."""
    return any(descend(row.row, key) for row in rows)


def _has_prompt(fields: RowFields) -> bool:
    """True for a prompt of a pair or ranking: its own, or one in the responses, chats or transcripts."""
    side = fields.chosen
    if isinstance(fields.ranked, list) and fields.ranked:
        side = fields.ranked[0]

    first = side[0] if isinstance(side, list) and side else None
    if isinstance(first, dict) and first.get("role") != "assistant":
        return True
    return fields.prompt is not None or (isinstance(side, str) and side.startswith("\n\nHuman:"))


def _has_text(value: Any) -> bool:
    """True if ``value`` has a text or messages.

    Blanks and numbers, which are texts in CSV files, do not count.
    """
    if isinstance(value, list):
        return any(isinstance(item, dict) or _has_text(item) for item in value)
    if not isinstance(value, str):
        return False
    text = value.strip()
    return text != "" and re.fullmatch(NUMBER, text) is None


def _without_bad_answers(rows: Sequence[SourceRow]) -> list[SourceRow]:
    """Leave out the rows of KTO whose answer is a bad one; they are counted in the log."""
    kept = []
    bad = Counter[tuple[str, str]]()
    for row in rows:
        column = kto_column(row.row)
        if column and str(row.row[column]).lower() == "false":
            bad[_place(row), column] += 1
        else:
            kept.append(row)

    for (place, column), n_bad in bad.items():
        n_rows = sum(_place(row) == place for row in rows)
        logger.warning(
            "%s: %d of %d rows are not trained: their %r is false", place, n_bad, n_rows, column
        )
    if not kept:
        raise ValueError(
            f"{rows[0].flag}: no row is left: {column!r} is false in all of them. Use other data."
        )
    return kept
