"""A model with tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig


class ToolAgent(Agent):
    """Calls tools until the model answers without a call (stub)."""

    gives_rewards = False

    def __init__(self, tools: Sequence[Any], options: AgentConfig) -> None:
        self.tools, self.options = tools, options

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        raise NotImplementedError
