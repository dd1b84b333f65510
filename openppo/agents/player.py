"""Player of an agent's episodes, in place of single responses."""

from openppo import logger
from openppo.agents.episodes import Agent, play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup
from openppo.config.agents import AgentConfig
from openppo.rollout.players import PlayerParts
from openppo.types import EpisodeInput, Sample, SamplingParams


class EpisodePlayer:
    """Plays episodes of ``agent``, whose calls of tools ``parser`` reads."""

    def __init__(self, agent: Agent, options: AgentConfig, parser: str, parts: PlayerParts) -> None:
        self.agent = agent
        self.options = options
        self.parts = parts
        self.renderer = Renderer(parts.tokenizer, parser, parts.eos_token_ids, vision=parts.vision)
        self._has_warned_of_both = False

    async def start(self) -> None:
        """Start the agent."""
        await self.agent.start()

    async def play(self, task: EpisodeInput, params: SamplingParams) -> Sample:
        """Play one episode."""
        driver = self.parts.driver
        setup = SessionSetup(
            self.renderer,
            driver.generate,
            params,
            options=self.options,
            longest=self.options.episode_max_len or self.parts.longest,
            context=self.parts.context,
            stood=lambda: driver.stood,
        )
        played = await play(self.agent, task, setup, needs_reward=not self.parts.has_rewards)
        if played.session.counts["rewarded_turns"] > 0:
            self._warn_of_both(played.episode.tool_rewards)
        return played.sample

    async def end(self) -> None:
        """End the agent."""
        await self.agent.stop()

    def _warn_of_both(self, tool_rewards: dict[str, list[float]]) -> None:
        """Warn once, on one rank, that rewards of tools are added to those of other sources."""
        if self._has_warned_of_both or not self.parts.has_rewards or self.parts.comm.rank > 0:
            return
        if not tool_rewards:
            return

        self._has_warned_of_both = True
        logger.warning(
            "rewards of tools (%s) are added to those of reward functions and other sources: both count. With "
            "--tool_rewards none functions only see them, as tool_rewards.",
            ", ".join(tool_rewards),
        )
