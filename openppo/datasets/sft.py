"""Rows -> examples of the language-model loss: prompt with response, whole texts, documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openppo.config import SFTDataConfig, SupervisedConfig
from openppo.datasets.formats import Row
from openppo.datasets.loading import naming_row, require_column
from openppo.datasets.templates import (
    as_text,
    encode_start,
    end_with_eos,
    render_response,
    render_whole,
    require_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenExample:
    """Equally long lists: ``loss_mask[t]`` says that token t is a target of the loss.

    The first token is never a target, because nothing comes before it to predict it from.
    """

    token_ids: list[int]
    loss_mask: list[bool]

    def __post_init__(self) -> None:
        lengths = len(self.token_ids), len(self.loss_mask)
        assert lengths[0] == lengths[1], f"lists of unequal length {lengths}"


def load_sft_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: SFTDataConfig,
    *,
    flag: str = "--dataset",
) -> tuple[list[TokenExample], int]:
    """One example per row, in order, and the number of rows dropped as longer than ``supervised.max_len`` tokens.

    With ``data.output_key`` the response and the EOS after it are the targets and the ids start with exactly those
    of ``render_prompt``; without, all of ``data.input_key`` and the EOS are. Raises ``ValueError`` naming ``flag``
    and the row for a missing column or a malformed value, and ``--max_len`` if no example is left.
    """
    require_tokenizer(tokenizer, apply_chat_template=supervised.apply_chat_template, eos=True)
    require_column(rows, data.input_key, flag_of_key="--input_key", flag_of_data=flag)
    if data.output_key is not None:
        require_column(rows, data.output_key, flag_of_key="--output_key", flag_of_data=flag)

    examples, lengths, bare_rows = [], [], 0
    for number, row in enumerate(rows, start=1):
        with naming_row(flag, number):
            example, as_rendered = _render_row(row, tokenizer, supervised, data)
        bare_rows += not as_rendered
        lengths.append(len(example.token_ids))
        if lengths[-1] <= supervised.max_len:
            examples.append(example)
    warn_of_bare_responses(bare_rows, flag)
    require_some_left(examples, lengths, supervised.max_len, flag)
    return examples, len(rows) - len(examples)


def load_documents(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, key: str, max_len: int
) -> list[TokenExample]:
    """Documents of ``--pretrain_data`` for the PTX loss: BOS if the tokenizer adds one, text, EOS; all are targets.

    A document is cut after ``max_len`` tokens; an empty one is left out. Raises ``ValueError`` naming the flag and the
    row for a missing column or a value that is no text, or if all documents are empty.
    """
    flag = "--pretrain_data"
    require_tokenizer(tokenizer, apply_chat_template=False, eos=True)
    require_column(rows, key, flag_of_key="--pretrain_key", flag_of_data=flag)
    examples, n_cut = [], 0
    for number, row in enumerate(rows, start=1):
        with naming_row(flag, number):
            text = as_text(row[key])
        ids = encode_start(tokenizer, text) if text.strip() else []
        if ids:
            ids = ids[:1] + end_with_eos(tokenizer, ids[1:])
            n_cut += len(ids) > max_len
            examples.append(_all_targets(ids[:max_len]))
    if not examples:
        raise ValueError(f"{flag}: every text in column {key!r} is empty. Name another column with --pretrain_key.")
    if len(examples) < len(rows):
        logger.info("%s: %d of %d documents are empty and left out.", flag, len(rows) - len(examples), len(rows))
    if n_cut:
        logger.info("%s: %d of %d documents are cut at %d tokens.", flag, n_cut, len(examples), max_len)
    return examples


def warn_of_bare_responses(count: int, flag: str) -> None:
    """Log once that ``count`` responses were not rendered by the chat template."""
    if count:
        logger.warning(
            "%s: in %d rows the chat template renders the prompt differently once a response follows. These examples "
            "are the rendered prompt, the bare text of the response and EOS.",
            flag,
            count,
        )


def require_some_left(examples: Sequence[object], lengths: Sequence[int], max_len: int, flag: str) -> None:
    """Raise ``ValueError`` naming ``--max_len`` if no example is short enough."""
    if not examples:
        raise ValueError(
            f"{flag}: all {len(lengths)} samples are longer than --max_len {max_len}; the shortest has {min(lengths)} "
            "tokens. Raise --max_len."
        )


def _render_row(
    row: Row, tokenizer: PreTrainedTokenizerBase, supervised: SupervisedConfig, data: SFTDataConfig
) -> tuple[TokenExample, bool]:
    """The example of a row, and whether its response is as the chat template renders it."""
    template, chat = supervised.input_template, supervised.apply_chat_template
    if data.output_key is None:
        ids = render_whole(row[data.input_key], tokenizer, input_template=template, apply_chat_template=chat)
        return _all_targets(ids), True
    prompt, response = row[data.input_key], row[data.output_key]
    rendered = render_response(prompt, response, tokenizer, input_template=template, apply_chat_template=chat)
    return _response_targets(rendered.prompt_ids, rendered.response_ids), rendered.as_rendered


def _response_targets(prompt_ids: list[int], response_ids: list[int]) -> TokenExample:
    return TokenExample(prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids))


def _all_targets(ids: list[int]) -> TokenExample:
    return _response_targets(ids[:1], ids[1:])
