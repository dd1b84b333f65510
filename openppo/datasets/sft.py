"""Rows -> examples of the language-model loss: prompt with response, whole texts, documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openppo.config import RowsConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets.row_formats import Keys, RowFields, RowReader
from openppo.datasets.sources import ShowRows, SourceRow, naming_row
from openppo.datasets.templates import (
    TokenExample,
    as_text,
    encode_start,
    end_with_eos,
    head_of,
    render_whole,
    require_tokenizer,
)
from openppo.datasets.turns import render_conversation, render_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_sft_examples(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: SFTDataConfig,
    *,
    flag: str = "--dataset",
    show: ShowRows = iter,
) -> tuple[list[TokenExample], int]:
    """One example per row, in order, and the number of rows dropped as longer than ``supervised.max_len`` tokens.

    Targets are the response and the EOS after it; of a chat, all turns of the assistant, each with what ends it; of a
    row without a response, or with ``data.output_key`` None, all tokens. Raises ``ValueError`` naming ``flag`` and the
    row for a missing column or a malformed value, and ``--max_len`` if no example is left.
    """
    chat, template = supervised.apply_chat_template, supervised.input_template
    require_tokenizer(tokenizer, apply_chat_template=chat, eos=True)
    reader = RowReader(rows, "sft", flag, supervised, _named_keys(data))
    n_empty = 0

    def render(fields: RowFields, row: SourceRow) -> TokenExample:
        nonlocal n_empty
        n_empty += fields.response == ""
        if fields.conversation is not None and chat:
            return render_conversation(fields.conversation, tokenizer, input_template=template)
        if fields.whole is not None:
            ids = render_whole(fields.whole, tokenizer, input_template=template, apply_chat_template=chat)
            return _all_targets(ids)
        return render_response(
            fields.prompt, fields.response, tokenizer, input_template=template, apply_chat_template=chat
        )

    limit = "--max_len", supervised.max_len
    examples, dropped = reader.examples(render, lambda example: len(example.token_ids), tokenizer, limit, show)
    if n_empty:
        logger.info("%s: %d of %d responses are empty; they teach to end at once", flag, n_empty, len(rows))
    return examples, dropped


def _named_keys(data: SFTDataConfig) -> Keys | None:
    """The columns that the user named; a default does not count."""
    if data.input_key is None and data.output_key == SFTDataConfig.output_key:
        return None
    input_column = (data.input_key or "input", "--input_key")
    if data.output_key is None:
        return {"whole": input_column}
    return {"prompt": input_column, "response": (data.output_key, "--output_key")}


def load_documents(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    key: str | None,
    max_len: int,
    show: ShowRows = iter,
) -> list[TokenExample]:
    """Documents of ``--pretrain_data`` for the PTX loss: BOS if the tokenizer adds one, text, EOS; all are targets.

    The text is column ``key``, else recognized. A document is cut after ``max_len`` tokens; an empty one is left out.
    Raises ``ValueError`` naming the flag and the row for a missing column or a value that is not text, or if all
    documents are empty.
    """
    flag = "--pretrain_data"
    require_tokenizer(tokenizer, apply_chat_template=False, eos=True)
    reader = RowReader(
        rows, "documents", flag, RowsConfig(), None if key is None else {"whole": (key, "--pretrain_key")}
    )
    examples, n_cut = [], 0
    for row in show(rows):
        with naming_row(flag, row):
            text = as_text(reader.read(row).whole)
        start = head_of(tokenizer, text, 2 * max_len)
        ids = encode_start(tokenizer, start) if text.strip() else []
        if ids:
            ids = ids[:1] + end_with_eos(tokenizer, ids[1:])
            n_cut += len(ids) > max_len
            examples.append(_all_targets(ids[:max_len]))
    if not examples:
        raise ValueError(f"{flag}: every text is empty. Name another column with --pretrain_key.")
    if len(examples) < len(rows):
        logger.info("%s: %d of %d documents are empty and left out.", flag, len(rows) - len(examples), len(rows))
    if n_cut:
        logger.info("%s: %d of %d documents are cut at %d tokens.", flag, n_cut, len(examples), max_len)
    return examples


def _all_targets(ids: list[int]) -> TokenExample:
    """Every token except the first, which nothing comes before."""
    return TokenExample(ids, [t > 0 for t in range(len(ids))])
