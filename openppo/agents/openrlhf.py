"""Agent files of OpenRLHF."""

from collections.abc import Mapping

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task


def is_openrlhf(location: str) -> bool:
    """Whether a file is one of OpenRLHF's agent files (stub)."""
    return False


class OpenRLHFAgent(Agent):
    """Steps an agent instance per episode (stub)."""

    def __init__(self, location: str) -> None:
        self.location = location

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        raise NotImplementedError
