"""Options of agents: form, limits and history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.fields import Options, at_least, not_empty, not_negative, option, positive

FORMS = ("tools", "environment", "agent_command", "agent")
"""Options that make a run an agent's; at most one of them is given."""

ToolParser = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek", "json"]


@dataclass(frozen=True)
class ConversationConfig(Options):
    """Limits of a conversation with the model, and the form of its history."""

    max_turns: int = option(16, at_least(1), measures=True)
    """Turns of the model in one episode."""
    episode_max_len: int | None = option(None, at_least(1), measures=True)
    """Tokens of one episode, prompt and all turns (default: --prompt_max_len + --generate_max_len)."""
    history: Literal["verbatim", "template"] = option("verbatim", measures=True, of_files=True)
    """Earlier turns as they were sampled, or as the chat template renders them in deployment (earlier thoughts cut)."""
    allow_image_urls: bool = False
    """Fetch images from public addresses that messages name; without it only data URLs are read."""
    tool_parser: ToolParser = option("auto", measures=True)
    """Format of the model's tool calls; auto recognizes it in the chat template."""


@dataclass(frozen=True)
class AgentConfig(ConversationConfig):
    """The agent, in one of four forms; without any, a prompt gets one response."""

    tools: str | None = option(None, place=True, resume="must match", measures=True)
    """Tools that the model may call: a Python file (BaseTool classes, @tool functions) or verl's YAML."""
    environment: str | None = option(None, place=True, resume="must match", measures=True)
    """An environment with gymnasium's reset and step, path.py:name."""
    agent_command: str | None = option(None, resume="must match", measures=True)
    """A program that talks to the OpenAI-compatible address in OPENAI_BASE_URL; {column} stands for the row's value."""
    agent: str | None = option(None, place=True, resume="must match", measures=True)
    """A coroutine solve(task, session), path.py:name, or an agent file of OpenRLHF, path.py."""
    agent_timeout: float = option(600.0, positive)
    """Seconds for one episode."""
    check_rendering: Literal["off", "warn", "strict"] = option("off", of_files=True)
    """Compare each conversation, rendered at its end, with the recorded tokens; strict drops what differs."""
    max_tool_response_tokens: int = option(1024, at_least(1), measures=True, of_files=True)
    """Results of tools are cut to this many tokens."""
    tool_timeout: float = option(60.0, positive, of_files=True)
    """Seconds for one call of a tool."""
    tool_rewards: Literal["add", "none"] = option("add", measures=True, needs="tools")
    """Rewards of tools: added to those of their turns, or only shown to reward functions and logged (none)."""
    n_envs: int | None = option(None, at_least(1), resume="must match", needs="environment")
    """Seeds of one global step, each played --n_samples_per_prompt times (default: --rollout_batch_size rows)."""
    format_penalty: float = option(0.1, not_negative, needs="environment", of_files=True)
    """Subtracted when an environment's action cannot be parsed."""
    eval_n_envs: int = option(0, not_negative, measures=True, needs="environment")
    """Seeds of the environment that are played in an evaluation."""
    eval_seed: int = option(
        1_000_003, not_negative, measures=True, needs="environment", of_files=True
    )
    """First evaluated seed."""
    agent_env: tuple[str, ...] = option((), not_empty, needs="agent_command", of_files=True)
    """Environment variables that --agent_command gets besides the usual ones."""
    agent_concurrency: int | None = option(None, at_least(1), of_files=True)
    """Programs that run at once on a rank (default: 4 for each core, shared by the ranks of a host)."""

    @property
    def form(self) -> str | None:
        """The option that names the agent; None without agents."""
        return next(iter(self._forms()), None)

    @property
    def may_give_rewards(self) -> bool:
        """True for an agent whose own rewards count."""
        return self.form is not None and self.tool_rewards == "add"

    @property
    def why_no_reward(self) -> str:
        """Reason why tools give no rewards, as the beginning of an error; empty without tools."""
        if self.tools is None:
            return ""
        if self.tool_rewards == "none":
            return f"--tool_rewards none: rewards of --tools {self.tools} are not added. "
        return f"No tool of --tools {self.tools} has a calc_reward. "

    def _forms(self) -> list[str]:
        return [name for name in FORMS if vars(self)[name] is not None]

    def problems(self) -> Iterator[str]:
        flags = [f"--{name}" for name in self._forms()]
        if len(flags) > 1:
            yield f"{' and '.join(flags)} each say what acts: leave all but one out."
