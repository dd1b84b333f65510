"""Parts of a run that its experience maker needs in addition to models and options."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from openppo.config.resolved import Resolved
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.tracking import PhaseTimer
from openppo.types import StopCheck


@dataclass(frozen=True)
class Hooks:
    """Timer and stop check of a run, names of its data ``sources``, and ids that its policy can sample.

    ``resolved`` are the sizes of its batches (None: those that options state).
    """

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    stop: StopCheck = field(default_factory=StopCheck)
    uncompiled: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context that is opened around forwards without training."""
    sources: Mapping[str, str] = field(default_factory=dict)
    sampled_ids: SampledIds = ALL_IDS
    resolved: Resolved | None = None
