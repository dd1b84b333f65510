"""Rows -> examples of the language-model loss: prompt with response, whole texts, documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openppo.config import SFTDataConfig, SupervisedConfig
from openppo.datasets.loading import ShowRows, SourceRow, naming_row
from openppo.datasets.shapes import Keys, RowFields, RowReader
from openppo.datasets.templates import (
    TokenExample,
    as_text,
    encode_start,
    end_with_eos,
    head_of,
    is_far_longer,
    render_whole,
    require_some_left,
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
    require_tokenizer(tokenizer, apply_chat_template=supervised.apply_chat_template, eos=True)
    reader = RowReader(
        rows,
        "sft",
        flag,
        data_format=supervised.data_format,
        chat=supervised.apply_chat_template,
        keys=_named_keys(data),
    )
    examples, lengths, n_empty = [], [], 0
    for row in show(rows):
        with naming_row(flag, row):
            parts = reader.read(row)
            values = [parts.prompt, parts.response, parts.conversation, parts.whole]
            if is_far_longer(values, tokenizer, supervised.max_len):
                continue
            example = _render(parts, tokenizer, supervised)
        n_empty += parts.response == ""
        lengths.append(len(example.token_ids))
        if lengths[-1] <= supervised.max_len:
            examples.append(example)
    require_some_left(examples, len(rows), lengths, f"--max_len {supervised.max_len}", flag)
    if n_empty:
        logger.info("%s: %d of %d responses are empty; they teach to end at once", flag, n_empty, len(rows))
    return examples, len(rows) - len(examples)


def _named_keys(data: SFTDataConfig) -> Keys | None:
    """The columns that the user named, if any; a default is no name."""
    if data.input_key is None and data.output_key == SFTDataConfig.output_key:
        return None
    input_column = (data.input_key or "input", "--input_key")
    if data.output_key is None:
        return {"whole": input_column}
    return {"prompt": input_column, "response": (data.output_key, "--output_key")}


def _render(parts: RowFields, tokenizer: PreTrainedTokenizerBase, supervised: SupervisedConfig) -> TokenExample:
    template, chat = supervised.input_template, supervised.apply_chat_template
    if parts.conversation is not None and chat:
        return render_conversation(parts.conversation, tokenizer, input_template=template)
    if parts.whole is not None:
        return _all_targets(render_whole(parts.whole, tokenizer, input_template=template, apply_chat_template=chat))
    return render_response(parts.prompt, parts.response, tokenizer, input_template=template, apply_chat_template=chat)


def load_documents(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    key: str | None,
    max_len: int,
    show: ShowRows = iter,
) -> list[TokenExample]:
    """Documents of ``--pretrain_data`` for the PTX loss: BOS if the tokenizer adds one, text, EOS; all are targets.

    The text is column ``key``, else recognized. A document is cut after ``max_len`` tokens; an empty one is left out.
    Raises ``ValueError`` naming the flag and the row for a missing column or a value that is no text, or if all
    documents are empty.
    """
    flag = "--pretrain_data"
    require_tokenizer(tokenizer, apply_chat_template=False, eos=True)
    reader = RowReader(rows, "documents", flag, keys=None if key is None else {"whole": (key, "--pretrain_key")})
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
    """Every token but the first, which nothing comes before."""
    return TokenExample(ids, [t > 0 for t in range(len(ids))])
