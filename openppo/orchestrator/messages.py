"""What the coordinator says to the ranks that sample."""

from dataclasses import dataclass
from typing import Literal

from openppo.orchestrator.schedule import Start
from openppo.rollout.tasks import RunTask
from openppo.types import Prompt


@dataclass(frozen=True)
class Play:
    """Play these groups; tasks that have ``joined`` meanwhile come with their prompts."""

    starts: list[Start]
    joined: list[tuple[RunTask, list[Prompt]]]


@dataclass(frozen=True)
class Pause:
    """Leave the engine: for ``weights`` of ``version``, for a ``batch`` that is complete, or at the ``end``."""

    reason: Literal["weights", "batch", "end"]
    version: int = -1
