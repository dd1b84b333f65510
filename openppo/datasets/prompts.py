"""Rows -> prompts of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openppo.config import PPODataConfig
from openppo.datasets.formats import Row
from openppo.datasets.loading import naming_row, require_column
from openppo.datasets.templates import render_prompt, require_tokenizer
from openppo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their rows, and how many rows were dropped because their prompt is too long."""

    prompts: list[Prompt]
    dropped: int


def load_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: PPODataConfig) -> PromptSet:
    """Render column ``config.input_key`` of each row into a ``Prompt``.

    A prompt longer than ``config.prompt_max_len`` tokens is dropped, never cut. Raises ``ValueError`` naming the flag
    and the row for a missing column or an empty or malformed prompt, and ``--prompt_max_len`` if no prompt is left.
    """
    flag = "--prompt_data"
    require_tokenizer(tokenizer, apply_chat_template=config.apply_chat_template, eos=False)
    require_column(rows, config.input_key, flag_of_key="--input_key", flag_of_data=flag)
    if config.label_key is not None:
        require_column(rows, config.label_key, flag_of_key="--label_key", flag_of_data=flag)

    prompts = []
    shortest = None
    for number, row in enumerate(rows, start=1):
        with naming_row(flag, number):
            text, ids = render_prompt(
                row[config.input_key],
                tokenizer,
                input_template=config.input_template,
                apply_chat_template=config.apply_chat_template,
            )
        shortest = min(len(ids), shortest or len(ids))
        if len(ids) <= config.prompt_max_len:
            label = None if config.label_key is None else row[config.label_key]
            prompts.append(Prompt(text=text, token_ids=ids, label=label, row=row))
    if not prompts:
        raise ValueError(
            f"{flag}: all {len(rows)} prompts are longer than --prompt_max_len {config.prompt_max_len}; the shortest "
            f"has {shortest} tokens. Raise --prompt_max_len."
        )
    return PromptSet(prompts, dropped=len(rows) - len(prompts))
