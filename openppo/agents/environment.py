"""An environment with gymnasium's reset, step and close as an agent."""

from collections.abc import Callable, Mapping
from typing import Any

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig


class EnvironmentAgent(Agent):
    """Plays an environment that ``make`` makes (stub)."""

    def __init__(self, make: Callable[[], Any], options: AgentConfig) -> None:
        self.make, self.options = make, options

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        raise NotImplementedError
