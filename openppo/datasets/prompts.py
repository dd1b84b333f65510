"""Rows -> prompts of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openppo.config.data import PromptDataConfig
from openppo.datasets.row_formats import RowFields, RowReader
from openppo.datasets.sources import ShowRows, SourceRow, require_column
from openppo.datasets.templates import as_messages, render_prompt, require_tokenizer
from openppo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their rows, and how many rows were dropped because their prompt is too long."""

    prompts: list[Prompt]
    dropped: int


def load_prompts(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptDataConfig,
    *,
    flag: str = "--prompt_data",
    show: ShowRows = iter,
) -> PromptSet:
    """Render the prompt of each row into a ``Prompt``.

    The prompt is column ``options.input_key``, else recognized. The label is column ``options.label_key``, else the
    answer of a recognized format, else None. A prompt longer than ``options.prompt_max_len`` tokens is dropped, never
    cut. Raises ``ValueError`` naming ``flag`` and the row for a missing column or an empty or malformed prompt, and
    ``--prompt_max_len`` if no prompt is left.
    """
    chat, template = options.apply_chat_template, options.input_template
    require_tokenizer(tokenizer, apply_chat_template=chat, eos=False)
    keys = None if options.input_key is None else {"prompt": (options.input_key, "--input_key")}
    reader = RowReader(rows, "prompts", flag, options, keys)
    if options.label_key is not None:
        require_column(rows, options.label_key, flag_of_key="--label_key", flag_of_data=flag)

    def render(fields: RowFields, row: SourceRow) -> Prompt:
        label = fields.label if options.label_key is None else row.row[options.label_key]
        messages = as_messages(fields.prompt, "user", template) if chat else None
        value, around = (fields.prompt, template) if messages is None else (messages, None)
        text, ids = render_prompt(value, tokenizer, input_template=around, apply_chat_template=chat)
        return Prompt(text, ids, label, row.row, messages, source=row.source, index=row.number - 1)

    limit = "--prompt_max_len", options.prompt_max_len
    return PromptSet(*reader.examples(render, lambda prompt: len(prompt.token_ids), tokenizer, limit, show))
