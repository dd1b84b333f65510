"""Rows -> prompts of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from openppo.datasets.loading import ShowRows, SourceRow, naming_row, require_column
from openppo.datasets.shapes import RowReader
from openppo.datasets.templates import (
    as_messages,
    is_far_longer,
    render_prompt,
    require_some_left,
    require_tokenizer,
)
from openppo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their rows, and how many rows were dropped because their prompt is too long."""

    prompts: list[Prompt]
    dropped: int


class PromptOptions(Protocol):
    """What every command that has prompts says of them: ``PPODataConfig`` and ``PromptsConfig`` do."""

    @property
    def data_format(self) -> str: ...
    @property
    def input_key(self) -> str | None: ...
    @property
    def label_key(self) -> str | None: ...
    @property
    def input_template(self) -> str | None: ...
    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def prompt_max_len(self) -> int: ...


def load_prompts(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    flag: str = "--prompt_data",
    show: ShowRows = iter,
) -> PromptSet:
    """Render the prompt of each row into a ``Prompt``.

    The prompt is column ``options.input_key``, else recognized. The label is column ``options.label_key``, else the
    answer that a recognized shape holds, else None. A prompt longer than ``options.prompt_max_len`` tokens is dropped,
    never cut; one of megabytes is not even tokenized whole. Raises ``ValueError`` naming ``flag`` and the row for a
    missing column or an empty or malformed prompt, and ``--prompt_max_len`` if no prompt is left.
    """
    require_tokenizer(tokenizer, apply_chat_template=options.apply_chat_template, eos=False)
    keys = None if options.input_key is None else {"prompt": (options.input_key, "--input_key")}
    reader = RowReader(
        rows, "prompts", flag, data_format=options.data_format, chat=options.apply_chat_template, keys=keys
    )
    if options.label_key is not None:
        require_column(rows, options.label_key, flag_of_key="--label_key", flag_of_data=flag)

    prompts, lengths = [], []
    for row in show(rows):
        with naming_row(flag, row):
            parts = reader.read(row)
            if is_far_longer([parts.prompt], tokenizer, options.prompt_max_len):
                continue
            label = parts.label if options.label_key is None else row.row[options.label_key]
            prompt = _render(parts.prompt, tokenizer, options, label, row)
        lengths.append(len(prompt.token_ids))
        if lengths[-1] <= options.prompt_max_len:
            prompts.append(prompt)
    require_some_left(prompts, len(rows), lengths, f"--prompt_max_len {options.prompt_max_len}", flag)
    return PromptSet(prompts, dropped=len(rows) - len(prompts))


def _render(
    value: Any, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, label: Any, row: SourceRow
) -> Prompt:
    template, messages = options.input_template, None
    if options.apply_chat_template:
        value = messages = as_messages(value, "user", template)
        template = None  # it is in the messages
    text, ids = render_prompt(
        value, tokenizer, input_template=template, apply_chat_template=options.apply_chat_template
    )
    return Prompt(text, ids, label, row.row, messages, source=row.source, index=row.number - 1)
