"""Rows -> examples: loading, templates, prompts, supervised and preference examples, the order of batches."""

from openppo.datasets.formats import Row
from openppo.datasets.loading import (
    ShowRows,
    SourceRow,
    load_mixed_rows,
    load_rows,
    naming_row,
    number_rows,
    require_column,
)
from openppo.datasets.preference import PreferenceExample, load_preferences
from openppo.datasets.process import ProcessExample, StepEncoder, load_process_examples, single_token_id
from openppo.datasets.prompts import PromptOptions, PromptSet, load_prompts
from openppo.datasets.sampler import BatchSampler, cyclic_batches, shard
from openppo.datasets.sft import load_documents, load_sft_examples
from openppo.datasets.shapes import RowFields, RowReader
from openppo.datasets.templates import TokenExample, render_prompt, render_whole
from openppo.datasets.turns import render_conversation, render_response

__all__ = [
    "BatchSampler",
    "PreferenceExample",
    "ProcessExample",
    "PromptOptions",
    "PromptSet",
    "Row",
    "RowFields",
    "RowReader",
    "ShowRows",
    "SourceRow",
    "StepEncoder",
    "TokenExample",
    "cyclic_batches",
    "load_documents",
    "load_mixed_rows",
    "load_preferences",
    "load_process_examples",
    "load_prompts",
    "load_rows",
    "load_sft_examples",
    "naming_row",
    "number_rows",
    "render_conversation",
    "render_prompt",
    "render_response",
    "render_whole",
    "require_column",
    "shard",
    "single_token_id",
]
