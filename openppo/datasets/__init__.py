"""Rows -> examples: loading, templates, prompts, supervised and preference examples, the order of batches."""

from openppo.datasets.formats import Row
from openppo.datasets.loading import load_rows, naming_row, require_column
from openppo.datasets.preference import PreferenceExample, load_preferences
from openppo.datasets.prompts import PromptSet, load_prompts
from openppo.datasets.sampler import BatchSampler, cyclic_batches, shard
from openppo.datasets.sft import TokenExample, load_documents, load_sft_examples
from openppo.datasets.templates import RenderedExample, render_prompt, render_response, render_whole

__all__ = [
    "BatchSampler",
    "PreferenceExample",
    "PromptSet",
    "RenderedExample",
    "Row",
    "TokenExample",
    "cyclic_batches",
    "load_documents",
    "load_preferences",
    "load_prompts",
    "load_rows",
    "load_sft_examples",
    "naming_row",
    "render_prompt",
    "render_response",
    "render_whole",
    "require_column",
    "shard",
]
