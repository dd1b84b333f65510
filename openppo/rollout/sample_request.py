"""The request for samples of a batch of prompts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openppo.tracking import Metrics
from openppo.types import (
    Prompt,
    SamplingParams,
    Trajectory,
)


def _ignore(failed: Trajectory) -> None:
    """Take no note."""


class SampleRequest(NamedTuple):
    """``n_samples`` of each prompt, asked alike on all ranks.

    ``first_group`` is the number in the whole run of the first prompt; groups and seeds follow from it and ``seed``, so
    that a sample does not depend on the number of ranks. An ``evaluation`` keeps samples that failed; else
    ``note_failed`` gets a stand-in for each.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    n_samples: int
    seed: int
    first_group: int
    metrics: Metrics
    evaluation: bool = False
    note_failed: Callable[[Trajectory], None] = _ignore
