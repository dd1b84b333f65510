"""Rows of one data flag -> their fields and examples: by columns that options name, or in a recognized format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config.data import RowsConfig
from openppo.datasets.row_formats import ROW_FORMATS, RowFields, RowFormat, Task
from openppo.datasets.sources import ShowRows, SourceRow, descend, naming_row, value_of
from openppo.datasets.template_checks import name_rendered
from openppo.datasets.templates import read_tools
from openppo.datasets.tokenization import to_json, tokenize, tokenizing_content

T = TypeVar("T")
Keys = Mapping[str, tuple[str, str]]
"""Columns that the user named: by field the column and its flag."""

KEY_FLAGS: Mapping[Task, str] = {
    "prompts": "--input_key",
    "sft": "--input_key and --output_key",
    "pairs": "--chosen_key and --rejected_key",
    "steps": "--input_key and --label_key",
    "documents": "--pretrain_key",
}


class RowReader:
    """Reads the rows of one data flag: from columns ``keys``, or in the format of the first row of their source.

    ``options`` name the format, or 'auto' recognizes it; it is logged once for each source, with its columns. Raises
    ``ValueError`` naming the flag and the columns if none fits.
    """

    def __init__(self, rows: Sequence[SourceRow], task: Task, options: RowsConfig, keys: Keys | None = None) -> None:
        self.rows, self.task, self.chat, self.keys = rows, task, options.apply_chat_template, keys or {}
        self.tools_key, self.processes = options.tools_key, options.dataset_num_proc
        keys_of = {"image": options.image_key, "video": options.video_key}
        self.media_keys = {kind: key for kind, key in keys_of.items() if key is not None}
        self.found = {kind for kind, key in self.media_keys.items() if any(descend(row.row, key) for row in rows)}
        self.content = task, self.chat, options.input_template, options.chat_template_kwargs
        self.formats: dict[str, RowFormat] = {}
        named = options.data_format
        if self.keys and named not in ("auto", "plain"):
            flags = " and ".join(flag for _, flag in self.keys.values())
            raise ValueError(f"--data_format {named} knows its columns, and {flags} names others: leave one out.")
        if not self.keys:
            possible = [found for found in ROW_FORMATS if task in found.needs]
            candidates = [found for found in possible if named in ("auto", found.name)]
            if not candidates:
                others = ", ".join(sorted({found.name for found in possible}))
                raise ValueError(f"--data_format {named} is not for this command: use {others}.")
            for row in rows:
                if row.source not in self.formats:
                    self.formats[row.source] = self._recognize(row, candidates)

    def read(self, row: SourceRow) -> RowFields:
        """The fields of ``row``. Raises ``ValueError`` for malformed values and missing columns."""
        key = self.tools_key
        tools = None if key is None else read_tools(value_of(row.row, key, "--tools_key"), key)
        fields = replace(self._fields(row), tools=tools)
        media = {}
        for kind, key in self.media_keys.items():
            if descend(row.row, key) or not (kind in self.found or row.flag.startswith("--eval")):
                media[kind] = value_of(row.row, key, f"--{kind}_key")
        return replace(fields, media=media, source=row.source)

    def _fields(self, row: SourceRow) -> RowFields:
        if self.keys:
            return RowFields(**{part: value_of(row.row, key, flag) for part, (key, flag) in self.keys.items()})
        row_format = self.formats[row.source]
        if not row_format.columns_of(row.row, self.task):
            raise ValueError(
                f"not of format {row_format.describe(self.task)}, with which its source starts. {self._remedy(row)}."
            )
        return row_format.read(row.row, self.chat)

    def make(
        self,
        render: Callable[[RowFields], T],
        kind: Callable[..., T],
        show: ShowRows,
        tokenizer: PreTrainedTokenizerBase,
        more: object = None,
    ) -> list[T]:
        """What ``render`` makes of each row, in order; its ``ValueError`` names the flag of the data and the row.

        With ``--dataset_num_proc`` other processes make the attributes of ``kind``, or they are kept from before.
        ``render`` depends on ``tokenizer``, options of templates and ``more``.
        """
        made: list[T] = []
        prompts = []
        if self.processes == 0:
            for row in show(self.rows):
                with naming_row(row):
                    fields = self.read(row)
                    made.append(render(fields))
                prompts.append(fields.prompt)
            self._name_rendered(prompts, tokenizer)
            return made

        contents = []
        for row in self.rows:
            with naming_row(row):
                fields = self.read(row)
                contents.append(to_json(fields))
            prompts.append(fields.prompt)
        self._name_rendered(prompts, tokenizer)
        found = tokenize(render, contents, tokenizing_content(tokenizer, *self.content, more), self.processes, show)
        for row, attributes in zip(self.rows, found, strict=True):
            with naming_row(row):
                if isinstance(attributes, str):
                    raise ValueError(attributes)
                made.append(kind(**attributes))
        return made

    def _name_rendered(self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
        if self.chat:
            name_rendered(prompts, tokenizer, self.rows[0].flag)

    def within(
        self,
        limit: tuple[str, int],
        examples: Sequence[T],
        length: Callable[[Any], int] = lambda example: len(example.token_ids),
    ) -> list[T]:
        """``examples`` that are no longer than ``limit``, a flag and its tokens; ``ValueError`` if none is left."""
        (flag_of_limit, most), flag = limit, self.rows[0].flag
        kept = [example for example in examples if length(example) <= most]
        if not kept:
            raise ValueError(
                f"{flag}: all {len(examples)} rows are longer than {flag_of_limit} {most}; the shortest has "
                f"{min(map(length, examples))} tokens. Raise {flag_of_limit}."
            )
        n_kept, n_dropped = len(kept), len(examples) - len(kept)
        if n_dropped:
            logger.info("%s: %d rows longer than %s were dropped, %d are kept", flag, n_dropped, flag_of_limit, n_kept)
        return kept

    def _recognize(self, row: SourceRow, candidates: Sequence[RowFormat]) -> RowFormat:
        where = f"{row.flag} {row.source}".strip()
        for candidate in candidates:
            if columns := candidate.columns_of(row.row, self.task):
                logger.info("%s: rows are read as %s, by their columns %s", where, candidate.name, ", ".join(columns))
                return candidate
        names = {candidate.name for candidate in candidates}
        what = "have no known format" if len(names) > 1 else f"are not of format {candidates[0].describe(self.task)}"
        raise ValueError(f"{where}: its rows {what}. {self._remedy(row)}.")

    def _remedy(self, row: SourceRow) -> str:
        others = "" if self.task == "documents" else ", or the format with --data_format"
        return f"Its columns are {', '.join(map(str, row.row))}: name them with {KEY_FLAGS[self.task]}{others}"
