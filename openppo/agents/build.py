"""Make the ``source`` of ``build_ppo_trainer`` from options or an agent of one's own."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.agents.environment import EnvironmentAgent
from openppo.agents.episodes import Agent
from openppo.agents.openrlhf import OpenRLHFAgent
from openppo.agents.parsers import choose_parser
from openppo.agents.program import ProgramAgent
from openppo.agents.sampler import AgentSampler
from openppo.agents.session import Session, Task
from openppo.agents.tool_agent import ToolAgent
from openppo.agents.tools import load_tools
from openppo.config.agents import AgentConfig
from openppo.datasets.template_checks import left_out
from openppo.rollout.samplers import Players, SamplerParts
from openppo.types import Prompt
from openppo.user_code import load_callable

Solve = Callable[[Task, Session], Awaitable[float | Mapping[str, float] | None]]


class FunctionAgent(Agent):
    """A coroutine ``solve(task, session)``."""

    def __init__(self, solve: Solve, source: str) -> None:
        if not inspect.iscoroutinefunction(solve) or len(inspect.signature(solve).parameters) != 2:
            raise ValueError(
                f"{source} is no coroutine of two arguments: write 'async def solve(task, session)'."
            )
        self.solve = solve

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode."""
        return await self.solve(task, session)


class AgentSource(Players):
    """Episodes of ``agent``, a coroutine ``solve(task, session)`` or an ``Agent``, in place of single responses."""

    def __init__(self, agent: Agent | Solve, options: AgentConfig | None = None) -> None:
        self.agent = (
            agent
            if isinstance(agent, Agent)
            else FunctionAgent(agent, getattr(agent, "__name__", "agent"))
        )
        self.options = options or AgentConfig()
        self.parser: str = self.options.tool_parser
        self.gives_rewards = not isinstance(agent, ToolAgent) or agent.gives_rewards
        self.needs_prompts = isinstance(agent, ToolAgent | OpenRLHFAgent)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """``ValueError`` if the tokenizer has no chat template; chooses the parser of tool calls."""
        if isinstance(self.agent, OpenRLHFAgent):  # its texts have their own role marks
            if self.options.check_rendering != "off":
                raise ValueError(
                    "--check_rendering: an agent file of OpenRLHF uses no chat template: leave it out."
                )
            return
        self.parser = choose_parser(
            tokenizer.chat_template, self.parser, f"--{self.options.form or 'pretrain'}"
        )
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
        """``ValueError`` for rows that the agent cannot play."""
        if any(prompt.media for prompt in prompts) and isinstance(self.agent, OpenRLHFAgent):
            raise ValueError(
                "--image_key: an agent file of OpenRLHF reads texts: write a coroutine for --agent."
            )
        if any(prompt.media and prompt.messages is None for prompt in prompts):
            raise ValueError(
                "--image_key: agents get images in chat messages: add --apply_chat_template."
            )
        self.agent.check(prompts)

    def make(self, parts: SamplerParts) -> AgentSampler:
        """The sampler."""
        return AgentSampler(
            self.agent, self.options, "json" if self.parser == "auto" else self.parser, parts=parts
        )


def agent_source(options: AgentConfig) -> AgentSource | None:
    """The source that options ask for; None without any. ``ValueError`` names the option of what cannot be loaded."""
    if options.tools is not None:
        return AgentSource(ToolAgent(load_tools(options.tools), options), options)
    if options.environment is not None:
        return AgentSource(
            EnvironmentAgent(load_callable(options.environment, "--environment"), options), options
        )
    if options.agent_command is not None:
        return AgentSource(ProgramAgent(options), options)
    if options.agent is not None:
        if options.agent.endswith(".py"):  # a coroutine would be named: path.py:name
            return AgentSource(OpenRLHFAgent(options.agent), options)
        return AgentSource(
            FunctionAgent(load_callable(options.agent, "--agent"), f"--agent {options.agent}"),
            options,
        )
    return None
