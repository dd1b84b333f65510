"""A program that nobody changed, which talks to the gateway, as an agent."""

from collections.abc import Mapping

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig


class ProgramAgent(Agent):
    """Runs a command for each episode (stub)."""

    def __init__(self, options: AgentConfig) -> None:
        self.options = options

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        raise NotImplementedError
