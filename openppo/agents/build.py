"""The ``source`` of ``build_ppo_trainer``, from options or an agent of one's own."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.agents.environment import EnvironmentAgent
from openppo.agents.episodes import Agent
from openppo.agents.openrlhf import OpenRLHFAgent
from openppo.agents.parsers import choose_parser
from openppo.agents.player import EpisodePlayer
from openppo.agents.program import ProgramAgent
from openppo.agents.session import Session
from openppo.agents.tool_agent import ToolAgent
from openppo.agents.tools import load_tools
from openppo.config.agents import AgentConfig
from openppo.datasets.template_checks import left_out
from openppo.rollout.players import PlayerParts, Players
from openppo.types import EpisodeInput, Prompt
from openppo.user_code import load_callable

Solve = Callable[[EpisodeInput, Session], Awaitable[float | Mapping[str, float] | None]]


class FunctionAgent(Agent):
    """A coroutine ``solve(task, session)``."""

    def __init__(self, solve: Solve, source: str) -> None:
        is_coroutine = inspect.iscoroutinefunction(solve)
        if not is_coroutine or len(inspect.signature(solve).parameters) != 2:
            raise ValueError(
                f"{source} is no coroutine of two arguments: write 'async def solve(task, session)'."
            )
        self.solve = solve

    async def run(self, task: EpisodeInput, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        return await self.solve(task, session)


class AgentPlayer(Players):
    """Episodes of ``agent``, a coroutine ``solve(task, session)`` or an ``Agent``, in place of single responses."""

    def __init__(self, agent: Agent | Solve, options: AgentConfig | None = None) -> None:
        if isinstance(agent, Agent):
            self.agent: Agent = agent
        else:
            self.agent = FunctionAgent(agent, getattr(agent, "__name__", "agent"))

        self.options = options or AgentConfig()
        self.parser: str = self.options.tool_parser
        self.gives_rewards = not isinstance(agent, ToolAgent) or agent.gives_rewards
        self.needs_prompts = isinstance(agent, ToolAgent | OpenRLHFAgent)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Choose the parser of tool calls; ``ValueError`` if the tokenizer has no chat template."""
        if isinstance(self.agent, OpenRLHFAgent):  # its texts have their own role marks
            if self.options.check_rendering != "off":
                raise ValueError(
                    "check_rendering: an agent file of OpenRLHF uses no chat template: leave it out."
                )
            return

        flag = f"--{self.options.form or 'pretrain'}"
        self.parser = choose_parser(tokenizer.chat_template, self.parser, flag)

        missing = left_out(tokenizer) if isinstance(self.agent, ToolAgent) else set()
        if "results" in missing:
            raise ValueError(
                "--tools: the chat template refuses or leaves out what tools return. Use another model."
            )
        if missing:
            names = " and ".join(sorted(missing))
            logger.warning(
                "the chat template does not write %s: say in the prompt how tools are called", names
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``ValueError`` for rows that the agent cannot play."""
        with_images = [prompt for prompt in prompts if prompt.media]
        if with_images and isinstance(self.agent, OpenRLHFAgent):
            raise ValueError(
                "--image_key: an agent file of OpenRLHF reads texts: write a coroutine for --agent."
            )
        if any(prompt.messages is None for prompt in with_images):
            raise ValueError(
                "--image_key: agents get images in chat messages: add --apply_chat_template."
            )
        self.agent.check(prompts)

    def make(self, parts: PlayerParts) -> EpisodePlayer:
        """Return the player of episodes."""
        parser = "json" if self.parser == "auto" else self.parser
        return EpisodePlayer(self.agent, self.options, parser, parts=parts)


def agent_source(options: AgentConfig) -> AgentPlayer | None:
    """Return the player that options select, or None; ``ValueError`` names the option that cannot be loaded."""
    agent = _agent(options)
    return None if agent is None else AgentPlayer(agent, options)


def _agent(options: AgentConfig) -> Agent | None:
    if options.tools is not None:
        return ToolAgent(load_tools(options.tools), options)
    if options.environment is not None:
        make = load_callable(options.environment, "--environment")
        return EnvironmentAgent(make, options)
    if options.agent_command is not None:
        return ProgramAgent(options)
    if options.agent is None:
        return None

    if options.agent.endswith(".py"):  # a coroutine would be named: path.py:name
        return OpenRLHFAgent(options.agent)
    solve = load_callable(options.agent, "--agent")
    return FunctionAgent(solve, f"--agent {options.agent}")
