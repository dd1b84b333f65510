"""Agents: many turns over recorded token ids. Names load on first use."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.agents.build import AgentPlayer as AgentPlayer, agent_source as agent_source
    from openppo.agents.episodes import Agent as Agent
    from openppo.agents.session import EpisodeEnded as EpisodeEnded, Session as Session
    from openppo.agents.turn import Turn as Turn
    from openppo.sample import EpisodeInput as EpisodeInput

__getattr__, __dir__, __all__ = lazy_names(__name__)
