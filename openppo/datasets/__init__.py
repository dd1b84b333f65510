"""Rows -> examples: loading, templates, prompts, supervised and preference examples, order of batches."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.datasets.examples import (
        load_documents as load_documents,
        load_prompts as load_prompts,
    )
    from openppo.datasets.examples import load_sft_examples as load_sft_examples
    from openppo.datasets.examples import load_tasks as load_tasks, seed_prompts as seed_prompts
    from openppo.datasets.preferences import PreferenceExample as PreferenceExample
    from openppo.datasets.preferences import (
        RankingExample as RankingExample,
        load_preferences as load_preferences,
    )
    from openppo.datasets.process import (
        ProcessExample as ProcessExample,
        StepEncoder as StepEncoder,
    )
    from openppo.datasets.process import load_process_examples as load_process_examples
    from openppo.datasets.process import single_token_id as single_token_id
    from openppo.datasets.orders import prompt_order as prompt_order
    from openppo.datasets.prompts import render_prompt as render_prompt
    from openppo.datasets.sampler import (
        BatchSampler as BatchSampler,
        cyclic_batches as cyclic_batches,
        shard as shard,
        shuffled as shuffled,
    )
    from openppo.datasets.sources import ShowRows as ShowRows, load_mixed_rows as load_mixed_rows
    from openppo.datasets.sources import number_rows as number_rows
    from openppo.datasets.templates import TokenExample as TokenExample
    from openppo.datasets.turns import (
        render_response as render_response,
        render_whole as render_whole,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
