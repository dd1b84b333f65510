"""An environment with gymnasium's reset, step and close as an agent."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.agents.threads import settle
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, text_of
from openppo.types import Ending, Prompt

RESET = "def reset(self, *, seed=None, options=None): ... return observation, info"
STEP = "def step(self, action): ... return observation, reward, terminated, truncated, info"
UNREADABLE = "Your answer could not be read as an action. Answer again."


class EnvironmentAgent(Agent):
    """Plays an environment of its own in each episode; ``make`` makes it.

    An action is the model's whole text, or what ``parse(text)`` of the environment makes of it: None for a text that
    is no action, which costs the format penalty and is no ``step``; the model is told ``unreadable``.
    """

    def __init__(self, make: Callable[[], Any], options: AgentConfig) -> None:
        self.make, self.options = make, options

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Make, reset and close one environment, and step it if any text is an action; ``ValueError`` if it fails."""
        asyncio.run(self._try(Task(prompts[0], 0)))

    async def run(self, task: Task, session: Session) -> float:
        """Play to the environment's end. Its rewards are those of turns; a single one, of the last step, the whole's.

        That lies on the same token, and estimators that compare groups then compare outcomes.
        """
        environment, paid = Environment(), False
        session.counts["unreadable_actions"] = 0
        try:
            await environment.open(self.make)
            said = await environment.reset(task)
            while True:
                turn = await session.chat(said)
                said = [*turn.messages, turn.message]
                action = await environment.action(str(turn.message.get("content") or ""))
                if action is None:
                    session.counts["unreadable_actions"] += 1
                    session.add_turn_reward(-self.options.format_penalty)
                    said.append({"role": "user", "content": environment.unreadable})
                    continue
                seen, reward, terminated, truncated = await environment.step(action)
                session.output = "\n".join(text_of(message.get("content")) for message in seen)
                if truncated and not terminated:
                    session.close(Ending.ENV_TRUNCATED)
                if (terminated or truncated) and not paid:
                    return reward
                if reward != 0:
                    paid = True
                    session.add_turn_reward(reward)
                if terminated or truncated:
                    return 0.0
                said += seen
        finally:
            await environment.close()

    async def _try(self, task: Task) -> None:
        environment = Environment()

        async def begin() -> None:
            await environment.open(self.make)
            await environment.reset(task)
            if environment.parse is None:
                await environment.step("-")

        [error] = await asyncio.gather(begin(), return_exceptions=True)
        await environment.close()
        if isinstance(error, FormError):
            raise error
        if isinstance(error, BaseException):
            raise ValueError(
                f"--environment: {type(error).__name__} when it was made, reset, and stepped with '-': {error}. A "
                "model may write anything: take any text, or add 'def parse(self, text)', which gives an action or "
                "None."
            ) from error


class FormError(ValueError):
    """What an environment returned has not gymnasium's form."""


class Environment:
    """A user's environment: what it returns is checked, and what may block runs on a thread of its own.

    A method that waits, for a browser or a network, would stop all episodes if it ran in their event loop. Each
    environment has one thread, as SQLite, Playwright and others are bound to the thread that made them; one that hangs
    delays no other. Coroutines are awaited in the event loop.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._last: Future[Any] = Future()
        self._made: Any = None
        # A daemon: one that hangs does not keep the process alive, as a thread of a pool would.
        threading.Thread(target=self._run_calls, name="environment", daemon=True).start()

    async def open(self, make: Callable[[], Any]) -> None:
        """Make it."""
        of_loop = inspect.iscoroutinefunction(getattr(make, "step", None))
        self._made = make() if of_loop else await self._call(make)
        self.parse = getattr(self._made, "parse", None)
        self.unreadable = str(getattr(self._made, "unreadable", UNREADABLE))
        for name, form in (("reset", RESET), ("step", STEP)):
            if not callable(getattr(self._made, name, None)):
                raise FormError(f"--environment: {type(self._made).__name__} has no {name}. Write '{form}'.")
        try:
            inspect.signature(self._made.reset).bind(seed=0, options=None)
        except TypeError as error:
            raise FormError(f"--environment: reset takes no seed and options ({error}). Write '{RESET}'.") from error

    async def reset(self, task: Task) -> list[Message]:
        """The first observation, as messages; options are the task's row, if there is one."""
        made = await self._call(self._made.reset, seed=task.env_seed, options=dict(task.prompt.row) or None)
        if not isinstance(made, tuple) or len(made) != 2:
            raise FormError(f"--environment: reset returned {_shape(made)}, not two values. Write '{RESET}'.")
        return messages_of(made[0], "reset")

    async def action(self, text: str) -> Any:
        """The action that a text is; None if it is none."""
        return text if self.parse is None else await self._call(self.parse, text)

    async def step(self, action: Any) -> tuple[list[Message], float, bool, bool]:
        """Observation, as messages, reward, terminated, truncated."""
        made = await self._call(self._made.step, action)
        if not isinstance(made, tuple) or len(made) != 5:
            raise FormError(f"--environment: step returned {_shape(made)}, not five values. Write '{STEP}'.")
        return messages_of(made[0], "step"), float(made[1]), bool(made[2]), bool(made[3])

    async def close(self) -> None:
        """Close it, without waiting for one that hangs."""
        close = getattr(self._made, "close", None)
        if close is not None and not self._last.running():
            await self._call(close)
        self._calls.put(None)

    async def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        call = partial(function, *values, **named)
        if inspect.iscoroutinefunction(function):
            return await call()
        self._last = Future()
        self._calls.put((self._last, call))
        made = await asyncio.wrap_future(self._last)
        return await made if inspect.isawaitable(made) else made

    def _run_calls(self) -> None:
        while (begun := self._calls.get()) is not None:
            settle(*begun)


def messages_of(observation: Any, where: str) -> list[Message]:
    """An observation, a text or chat messages, as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if isinstance(messages, list) and messages and all(isinstance(m, Mapping) and "role" in m for m in messages):
        return [dict(message) for message in messages]
    raise FormError(
        f"--environment: {where} gave the observation {_shape(observation)}, which a model cannot read: return a text "
        "or a list of chat messages. gymnasium.ObservationWrapper makes a text of another observation."
    )


def _shape(made: Any) -> str:
    return f"{len(made)} values" if isinstance(made, tuple) else f"{type(made).__name__} {str(made)[:60]!r}"
