"""An environment with gymnasium's reset, step and close as an agent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from openppo.agents.episodes import Agent
from openppo.agents.session import Session
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, text_of
from openppo.types import Ending, EpisodeInput, Prompt
from openppo.user_code import CallThread

UNREADABLE = "Your answer could not be read as an action. Answer again."
FORM = """Write
    def reset(self, *, seed=None, options=None): ... return observation, info
    def step(self, action): ... return observation, reward, terminated, truncated, info
where step takes any text, or add 'def parse(self, text)', which gives an action or None."""


class EnvironmentAgent(Agent):
    """Plays a new environment in each episode, the result of ``make()``.

    An action is the model's whole text, or the result of the environment's ``parse(text)``. If that is None, the text
    is no action: it costs the format penalty, nothing is stepped, and the model reads ``unreadable``.
    """

    def __init__(self, make: Callable[[], Any], options: AgentConfig) -> None:
        self.make = make
        self.options = options

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Try one environment: make, reset and close it, and step it if any text is an action.

        ``ValueError`` if that fails.
        """

        async def first_step() -> None:
            async with Environment.opened(self.make) as environment:
                await environment.reset(EpisodeInput(prompts[0], 0))
                if not environment.has_parse:
                    await environment.step("-")

        try:
            with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread runs a loop already
                thread.submit(asyncio.run, first_step()).result()
        except Exception as error:
            failed = f"{type(error).__name__} when tried (reset; without parse step('-')): {error}"
            raise ValueError(f"--environment: {failed}. {FORM}") from error

    async def run(self, task: EpisodeInput, session: Session) -> float:
        """Play to the environment's end, and return a reward of the whole episode.

        Rewards belong to turns; a single reward at the end belongs to the episode. Both lie on the same token, but
        estimators that compare groups then compare outcomes.
        """
        session.counts["unreadable_actions"] = 0
        turns_are_rewarded = False
        async with Environment.opened(self.make) as environment:
            messages = await environment.reset(task)
            while True:
                turn = await session.chat(messages)
                messages = list(turn.messages)
                action = await environment.action(str(turn.message.get("content") or ""))
                if action is None:
                    session.counts["unreadable_actions"] += 1
                    session.add_turn_reward(-self.options.format_penalty)
                    messages.append({"role": "user", "content": environment.unreadable})
                    continue

                observation, reward, terminated, truncated = await environment.step(action)
                texts = [text_of(each.get("content")) for each in observation]
                session.record_output("\n".join(texts))
                messages += observation

                has_ended = terminated or truncated
                if truncated and not terminated:
                    session.close(Ending.ENV_TRUNCATED)
                if has_ended and not turns_are_rewarded:
                    return reward
                if reward != 0:
                    turns_are_rewarded = True
                    session.add_turn_reward(reward)
                if has_ended:
                    return 0.0


class Environment:
    """A user's environment, with results checked and methods run on a thread of its own.

    A method that waits, for a browser or a network, would otherwise stop all episodes in their event loop; and SQLite,
    Playwright and others are bound to the thread that made them.
    """

    def __init__(self, environment: Any, thread: CallThread) -> None:
        self.environment = environment
        self.call = thread.call

    @property
    def has_parse(self) -> bool:
        """True if the environment reads actions in texts."""
        return hasattr(self.environment, "parse")

    @property
    def unreadable(self) -> Any:
        """Message for a text that is no action."""
        return getattr(self.environment, "unreadable", UNREADABLE)

    @classmethod
    @asynccontextmanager
    async def opened(cls, make: Callable[[], Any]) -> AsyncIterator["Environment"]:
        """Make an environment, and close it at the end, without waiting for one that hangs."""
        environment: Any = None
        thread = CallThread()
        try:
            environment = await thread.call(make)
            yield cls(environment, thread)
        finally:
            if hasattr(environment, "close") and thread.last.running():
                thread.begin(environment.close)  # behind a call that may hang
            elif hasattr(environment, "close"):
                await thread.call(environment.close)
            thread.end()

    async def reset(self, task: EpisodeInput) -> list[Message]:
        """Return the first observation, as messages; the task's row, if there is one, becomes ``options``."""
        options = dict(task.prompt.row) or None
        result = await self.call(self.environment.reset, seed=task.env_seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset returned {result!r:.80}, not two values")
        return messages_of(result[0])

    async def action(self, text: str) -> Any:
        """Return the action in a text, or None."""
        if self.has_parse:
            return await self.call(self.environment.parse, text)
        return text

    async def step(self, action: Any) -> tuple[list[Message], float, bool, bool]:
        """Return observation, as messages, reward, terminated, truncated."""
        result = await self.call(self.environment.step, action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(f"step returned {result!r:.80}, not five values")
        observation, reward, terminated, truncated, _ = result
        return messages_of(observation), float(reward), bool(terminated), bool(truncated)


def messages_of(observation: Any) -> list[Message]:
    """Return an observation, a text or a list of chat messages, as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and observation and all(map(_is_message, observation)):
        return [dict(message) for message in observation]
    raise TypeError(
        f"a model cannot read the observation {observation!r:.80}: return a text or a list of chat messages, "
        "with gymnasium.ObservationWrapper if the environment is not yours"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
