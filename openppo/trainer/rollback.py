"""Return to the state before the step under way."""

from typing import Any

from openppo.strategy.checkpoint.random_state import RandomState, get_random_state
from openppo.types import RolloutSource


class Rollback:
    """State of the source and of random generators, to which signals and failures roll back."""

    def __init__(self, source: RolloutSource) -> None:
        self.source = source
        self._source_state: dict[str, Any] = {}
        self._random_state: RandomState = {}

    def mark(self) -> None:
        """Take the state as it is now."""
        self._source_state = self.source.state_dict()
        self._random_state = get_random_state()

    def to_mark(self) -> RandomState:
        """Restore the source, and return the random state that belongs to it."""
        self.source.load_state_dict(self._source_state)
        return self._random_state
