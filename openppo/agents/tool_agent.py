"""A model with tools: it answers, its calls are executed, and so on until it answers without a call."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature
from typing import Any, TypeVar, cast
from uuid import uuid4

from openppo import logger
from openppo.agents.episodes import Agent, ToolError
from openppo.agents.matching import read_arguments
from openppo.agents.session import EpisodeEnded, Session, Task, Turn
from openppo.agents.threads import call
from openppo.agents.tools import BaseTool, ToolResponse
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, shortened
from openppo.types import Prompt

T = TypeVar("T")
Given = Mapping[str, Mapping[str, dict[str, Any]]]
"""Arguments of a row: by tool, and by "create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"."""

_CUT = " ... [cut]"
_LONGEST_TOKEN = 64
"""Characters: of a result that is far too long only a beginning is tokenized."""


class State(Enum):
    """Of an episode with tools."""

    PENDING = "its tools have no instances yet"
    RUNNING = "the model answers"
    TOOL_CALLING = "the calls of its answer are executed"
    COMPLETED = "the model answered without a call, or came to a limit"
    FAILED = "something raised, or the episode was cancelled"


class ToolAgent(Agent):
    """A model with ``tools``, of which a row may offer some."""

    def __init__(self, tools: Sequence[BaseTool], options: AgentConfig) -> None:
        self.tools, self.options = {tool.name: tool for tool in tools}, options
        self.gives_rewards = any(map(rewards_episodes, tools))
        self.failing: set[str] = set()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """``ValueError`` for a row that names an unknown tool; count rows that need arguments and have none."""
        lacking = 0
        for prompt in prompts:
            given = arguments_of(prompt.row)
            lacking += not given and bool((prompt.row.get("extra_info") or {}).get("need_tools_kwargs"))
            if unknown := sorted(given.keys() - self.tools):
                raise ValueError(
                    f"--tools {self.options.tools} has no tool {unknown[0]!r}, which row {prompt.index + 1} of "
                    f"{prompt.source} names in tools_kwargs. It has: {', '.join(self.tools)}. Correct the name."
                )
        if lacking:
            what = "rows say need_tools_kwargs and have none: their tools are created without arguments"
            logger.warning("%d of %d %s", lacking, len(prompts), what)

    async def run(self, task: Task, session: Session) -> None:
        """Play an episode, whose rewards are those of its turns."""
        given = arguments_of(task.prompt.row)
        tools = {name: tool for name, tool in self.tools.items() if name in given or not given}
        await ToolEpisode(self, session, tools, given, [dict(message) for message in task.messages]).play()


@dataclass(eq=False)
class ToolEpisode:
    """One episode of ``agent``, in which ``tools`` are offered, with the arguments ``given`` in its row."""

    agent: ToolAgent
    session: Session
    tools: dict[str, BaseTool]
    given: Given
    messages: list[Message]
    state: State = State.PENDING
    instances: dict[str, str] = field(default_factory=dict)

    async def play(self) -> None:
        """Act by the state until there is nothing to do, then reward; instances are released in any case."""
        acts = {State.PENDING: self._create, State.RUNNING: self._ask, State.TOOL_CALLING: self._execute}
        try:
            while self.state in acts:
                self.state = await acts[self.state]()
            await self._reward()
        except BaseException:
            self.state = State.FAILED
            raise
        finally:
            instances, self.instances = self.instances, {}
            await together("release", {name: self._use(name, "release", id_) for name, id_ in instances.items()})

    async def _create(self) -> State:
        """An instance of each tool. What tools say at the beginning is put behind the prompt."""

        async def create(name: str) -> str:
            made = await self._use(name, "create")
            id_, said = made if isinstance(made, tuple) else (made, "")
            self.instances[name] = id_  # at once: it must be released even if another tool fails
            return self._cut(text_of_response(said))

        said = await together("create", {name: create(name) for name in self.tools})
        self.messages[-1]["content"] = "\n\n".join(filter(None, [self.messages[-1]["content"], *said]))
        return State.RUNNING

    async def _ask(self) -> State:
        """The model's next answer; a limit that ends the episode is noted by the session."""
        try:
            turn = await self.session.chat(self.messages, [tool.tool_schema.offered() for tool in self.tools.values()])
        except EpisodeEnded:
            return State.COMPLETED
        self.messages.append(turn.message)
        return State.TOOL_CALLING if turn.tool_calls or turn.malformed else State.COMPLETED

    async def _execute(self) -> State:
        """All calls of the last turn at the same time. The model reads their results, or what was wrong."""
        turn = self.session.turns[-1]
        calls = [{"id": made["id"], **made["function"]} for made in turn.tool_calls]
        results = await asyncio.gather(*(self._call(**made, turn=turn) for made in calls), return_exceptions=True)
        for made, result in zip(calls, results, strict=True):
            text = self._cut(self._error(made["name"], result) if isinstance(result, BaseException) else result)
            self.messages.append({"role": "tool", "tool_call_id": made["id"], "name": made["name"], "content": text})
        if turn.malformed:
            said = self._error("", CallError(f"a tool call could not be read: {turn.malformed}"))
            if calls:  # templates want nothing between the results and the next answer
                self.messages[-1]["content"] += f"\n{said}"
            else:
                self.messages.append({"role": "user", "content": said})
        return State.RUNNING

    async def _call(self, id: str, name: str, arguments: str, turn: Turn) -> str:
        """Text of a call's result, whose reward is the turn's."""
        parameters = read_arguments(arguments)
        if name not in self.tools:
            raise CallError(f"there is no tool {name!r}; there are: {', '.join(self.tools)}")
        if not isinstance(parameters, dict):
            raise CallError(f"the arguments of {name} are no JSON object")
        takes_text = [*signature(self.tools[name].execute).parameters.values()][1].annotation in (str, "str")
        given = json.dumps(parameters, ensure_ascii=False) if takes_text else parameters
        result = await self._use(name, "execute", self.instances[name], given)
        response, reward, metrics = (*result, None, None)[:3] if isinstance(result, tuple) else (result, None, None)
        text, value = text_of_response(response), number(reward)
        for key, measured in (metrics or {}).items():
            if isinstance(measured, int | float):
                self.session.metrics[f"{name}/{key}"] = self.session.metrics.get(f"{name}/{key}", 0.0) + measured
        if value is not None:
            self.session.add_turn_reward(value, turn)
        return text

    async def _reward(self) -> None:
        """Put the rewards that tools give the episode on its last turn."""

        async def reward(name: str) -> float | None:
            return number(await self._use(name, "calc_reward", self.instances[name]))

        rewarding = [name for name in self.instances if rewards_episodes(self.tools[name])]
        for value in await together("calc_reward", {name: reward(name) for name in rewarding}):
            if value is not None:
                self.session.add_turn_reward(value)

    async def _use(self, name: str, method: str, *arguments: Any) -> Any:
        """Result of a tool's method, with the arguments of the row; ``TimeoutError`` if it takes too long."""
        work, seconds = getattr(self.tools[name], method), self.agent.options.tool_timeout
        given = self.given.get(name, {}).get(f"{method}_kwargs", {})
        if method == "create":
            given = create_arguments(work, given)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call(work, *arguments, **given)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"no result within {seconds:g} s") from error
            raise

    def _error(self, name: str, error: BaseException) -> str:
        """Count an error and say it to the model, the first of a tool also to the user."""
        self.session.counts["tool_errors"] += 1
        if not isinstance(error, CallError) and name not in self.agent.failing:
            self.agent.failing.add(name)
            logger.warning(
                "the tool %s raised %s; the model reads that, agent/tool_errors counts it", name, says(error)
            )
        return f"Error: {says(error)}"

    def _cut(self, text: str) -> str:
        """``text``, or its beginning of ``--max_tool_response_tokens`` with a mark."""
        renderer, most = self.session.setup.renderer, self.agent.options.max_tool_response_tokens
        text = text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
        beginning = text[: most * _LONGEST_TOKEN]
        ids = renderer.encode(beginning)
        return text if len(ids) <= most and beginning == text else renderer.decode(ids[:most]).rstrip("\ufffd") + _CUT


class CallError(Exception):
    """The model called no tool, or none rightly."""


async def together(method: str, works: Mapping[str, Awaitable[T]]) -> list[T]:
    """Results of a method of several tools; ``ToolError`` if one of them raises or takes too long."""
    results = await asyncio.gather(*works.values(), return_exceptions=True)
    for name, result in zip(works, results, strict=True):
        if isinstance(result, BaseException):
            raise ToolError(f"{name}.{method}: {says(result)}") from result
    return cast(list[T], results)


def rewards_episodes(tool: BaseTool) -> bool:
    """Whether a tool has a reward for whole episodes."""
    return type(tool).calc_reward is not BaseTool.calc_reward


def arguments_of(row: Mapping[str, Any]) -> Given:
    """``extra_info.tools_kwargs`` of a row; null, which Parquet puts for what is missing, is as good as absent."""
    tools = (row.get("extra_info") or {}).get("tools_kwargs") or {}
    return {
        tool: {part: {k: v for k, v in given.items() if v is not None} for part, given in parts.items() if given}
        for tool, parts in tools.items()
        if parts is not None
    }


def create_arguments(create: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` one by one, and where it is taken an id and, as verl's loop has it, all of it as ``create_kwargs``."""
    parameters = signature(create).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    more = {"instance_id": uuid4().hex, "create_kwargs": dict(given)}
    return {name: value for name, value in more.items() if takes_all or name in parameters} | dict(given)


def text_of_response(response: Any) -> str:
    """Text of what a tool returned, with a count of what the model cannot read."""
    if isinstance(response, Mapping) and "text" in response:
        response = ToolResponse(**response)
    if isinstance(response, ToolResponse):
        media = {"image": response.image, "video": response.video}
        left_out = [f"({len(found)} {kind} left out)" for kind, found in media.items() if found]
        return "\n".join(filter(None, [response.text, *left_out]))
    if not isinstance(response, str):
        raise TypeError(f"{shortened(response)} is no text, dict with 'text' or ToolResponse")
    return response


def number(reward: Any) -> float | None:
    """A reward, or the sum of a list; None and an empty list are none."""
    numbers = reward if isinstance(reward, list | tuple) else [reward]
    if not numbers or reward is None:
        return None
    if not math.isfinite(total := sum(map(float, numbers))):
        raise ValueError(f"the reward {total} is not finite")
    return total


def says(error: BaseException) -> str:
    """An error in one line."""
    return str(error) if isinstance(error, CallError) else f"{type(error).__name__}: {error}"
