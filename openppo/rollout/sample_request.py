"""The request for samples of prompts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openppo.tracking import Metrics
from openppo.types import Prompt, Sample, SamplingParams


def _ignore(failed: Sample) -> None:
    """Ignore a failed sample."""


class SampleRequest(NamedTuple):
    """A request for ``n_samples`` of each prompt, the same on all ranks.

    ``first_group`` is the number of the first prompt in the whole run; groups and seeds follow from it and ``seed``, so
    that a sample does not depend on the number of ranks. An ``evaluation`` keeps failed samples; otherwise
    ``note_failed`` gets a stand-in for each.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    n_samples: int
    seed: int
    first_group: int
    metrics: Metrics
    evaluation: bool = False
    note_failed: Callable[[Sample], None] = _ignore
