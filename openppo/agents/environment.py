"""An environment with gymnasium's reset, step and close as an agent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, text_of
from openppo.types import Ending, Prompt
from openppo.user_code import Worker

UNREADABLE = "Your answer could not be read as an action. Answer again."
FORM = """Write
    def reset(self, *, seed=None, options=None): ... return observation, info
    def step(self, action): ... return observation, reward, terminated, truncated, info
where step takes any text, or add 'def parse(self, text)', which gives an action or None."""


class EnvironmentAgent(Agent):
    """Plays an environment of its own in each episode; ``make`` makes it.

    An action is the model's whole text, or what ``parse(text)`` of the environment makes of it: None for a text that
    is no action, which costs the format penalty and is no ``step``; the model is told ``unreadable``.
    """

    def __init__(self, make: Callable[[], Any], options: AgentConfig) -> None:
        self.make, self.options = make, options

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Make, reset and close one environment, and step it if any text is an action; ``ValueError`` if it fails."""

        async def first_step() -> None:
            async with Environment.opened(self.make) as environment:
                await environment.reset(Task(prompts[0], 0))
                if not hasattr(environment.made, "parse"):
                    await environment.step("-")

        try:
            asyncio.run(first_step())
        except Exception as error:
            failed = f"{type(error).__name__} when tried (reset; without parse step('-')): {error}"
            raise ValueError(f"--environment: {failed}. {FORM}") from error

    async def run(self, task: Task, session: Session) -> float:
        """Play to the environment's end. Its rewards are those of turns; a single one, of the last step, the whole's.

        That lies on the same token, and estimators that compare groups then compare outcomes.
        """
        session.counts["unreadable_actions"], paid = 0, False
        async with Environment.opened(self.make) as environment:
            said = await environment.reset(task)
            while True:
                turn = await session.chat(said)
                said = list(turn.messages)
                action = await environment.action(str(turn.message.get("content") or ""))
                if action is None:
                    session.counts["unreadable_actions"] += 1
                    session.add_turn_reward(-self.options.format_penalty)
                    said.append(
                        {
                            "role": "user",
                            "content": getattr(environment.made, "unreadable", UNREADABLE),
                        }
                    )
                    continue
                seen, reward, terminated, truncated = await environment.step(action)
                session.output = "\n".join(text_of(message.get("content")) for message in seen)
                said += seen
                if truncated and not terminated:
                    session.close(Ending.ENV_TRUNCATED)
                if (terminated or truncated) and not paid:
                    return reward
                if reward != 0:
                    paid = True
                    session.add_turn_reward(reward)
                if terminated or truncated:
                    return 0.0


class Environment:
    """A user's environment: what it returns is checked, and its methods run on a thread of its own.

    One that waits, for a browser or a network, would stop all episodes in their event loop; and SQLite, Playwright and
    others are bound to the thread that made them.
    """

    def __init__(self, made: Any, worker: Worker) -> None:
        self.made, self.call = made, worker.call

    @classmethod
    @asynccontextmanager
    async def opened(cls, make: Callable[[], Any]) -> AsyncIterator["Environment"]:
        """One that ``make`` makes, closed at the end, without waiting for one that hangs."""
        made: Any = None
        worker = Worker()
        try:
            made = await worker.call(make)
            yield cls(made, worker)
        finally:
            if hasattr(made, "close") and worker.last.running():
                worker.begin(made.close)  # behind a call that may hang
            elif hasattr(made, "close"):
                await worker.call(made.close)
            worker.end()

    async def reset(self, task: Task) -> list[Message]:
        """The first observation, as messages; options are the task's row, if there is one."""
        made = await self.call(
            self.made.reset, seed=task.env_seed, options=dict(task.prompt.row) or None
        )
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"reset returned {made!r:.80}, not two values")
        return messages_of(made[0])

    async def action(self, text: str) -> Any:
        """The action that a text is; None if it is none."""
        return await self.call(self.made.parse, text) if hasattr(self.made, "parse") else text

    async def step(self, action: Any) -> tuple[list[Message], float, bool, bool]:
        """Observation, as messages, reward, terminated, truncated."""
        made = await self.call(self.made.step, action)
        if not isinstance(made, tuple) or len(made) != 5:
            raise TypeError(f"step returned {made!r:.80}, not five values")
        return messages_of(made[0]), float(made[1]), bool(made[2]), bool(made[3])


def messages_of(observation: Any) -> list[Message]:
    """An observation, a text or a list of chat messages, as messages."""
    messages = (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, Mapping) and "role" in m for m in messages)
    ):
        return [dict(message) for message in messages]
    raise TypeError(
        f"a model cannot read the observation {observation!r:.80}: return a text or a list of chat messages, "
        "with gymnasium.ObservationWrapper if the environment is not yours"
    )
