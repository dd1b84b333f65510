"""A model with tools: it answers, its calls are executed, and so on until it answers without a call."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from uuid import uuid4

from openppo import logger
from openppo.agents.episodes import Agent, ToolError
from openppo.agents.session import EpisodeEnded, Session, Task, finite_reward
from openppo.agents.tools import BaseTool, ToolResponse
from openppo.config.agents import AgentConfig
from openppo.datasets.row_formats import extra_info
from openppo.datasets.templates import encode_bare, shortened
from openppo.types import Prompt
from openppo.user_code import call

Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts."""


class Answer(NamedTuple):
    """Result of a call: the content that the model reads, and the reward, if there is one."""

    content: Content
    reward: float | None = None


class State(Enum):
    """An episode's states."""

    PENDING = "its tools have no instances yet"
    RUNNING = "the model answers"
    TOOL_CALLING = "the calls of its answer are executed"
    COMPLETED = "the model answered without a call, or came to a limit"
    FAILED = "something raised, or the episode was cancelled"


class ToolAgent(Agent):
    """A model with ``tools``, of which a row may offer some."""

    def __init__(self, tools: Sequence[BaseTool], options: AgentConfig) -> None:
        self.tools, self.options = {tool.name: tool for tool in tools}, options
        has_calc_reward = any(type(tool).calc_reward is not BaseTool.calc_reward for tool in tools)
        self.gives_rewards = has_calc_reward and options.tool_rewards == "add"
        self.failing: set[str] = set()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Count rows that need arguments and have none.

        ``ValueError`` for a row that names an unknown tool, or whose chat ends in a turn of the assistant.
        """
        lacking = 0
        for prompt in prompts:
            if prompt.messages and prompt.messages[-1]["role"] == "assistant":
                where = f"row {prompt.index + 1} of {prompt.source}"
                raise ValueError(
                    f"--tools: the prompt of {where} ends in a turn of the assistant, which only single responses "
                    "continue. Remove that turn, or leave --tools out."
                )
            given = arguments_of(prompt.row)
            lacking += not given and bool(present(extra_info(prompt.row)).get("need_tools_kwargs"))
            if unknown := sorted(given.keys() - self.tools):
                what = f"--tools has no tool {unknown[0]!r}, which row {prompt.index + 1} of {prompt.source} names"
                raise ValueError(
                    f"{what} in tools_kwargs. It has: {', '.join(self.tools)}. Correct the name."
                )
        if lacking:
            logger.warning(
                "%d of %d rows need tools_kwargs and have none: they play without",
                lacking,
                len(prompts),
            )

    async def run(self, task: Task, session: Session) -> None:
        """Play an episode, whose rewards are those of its turns."""
        await ToolEpisode(self, task, session).play()


class ToolEpisode:
    """One episode of ``agent``, with the tools that its row offers and the row's arguments for them."""

    def __init__(self, agent: ToolAgent, task: Task, session: Session) -> None:
        self.agent = agent
        self.session = session
        self.given = arguments_of(task.prompt.row)
        self.tools = {
            name: tool for name, tool in agent.tools.items() if name in self.given or not self.given
        }
        self.messages = [dict(message) for message in task.messages]
        self.instances: dict[str, str] = {}
        self.state = State.PENDING

    async def play(self) -> None:
        """Answer calls until the model makes none or comes to a limit, then reward; release in any case."""
        try:
            async with AsyncExitStack() as self.releases:
                await self._create()
                with suppress(EpisodeEnded):  # a limit, which the session has noted
                    while await self._has_calls():
                        await self._execute()
                self.state = State.COMPLETED
                for name, instance in self.instances.items():
                    self._keep(name, _number(name, await self._use(name, "calc_reward", instance)))
        except BaseException:
            self.state = State.FAILED
            raise

    async def _create(self) -> None:
        """Make an instance of each tool. What tools say at the beginning is put behind the prompt."""
        said = [self.messages[-1].get("content")]
        for name in self.tools:
            made = await self._use(name, "create")
            self.instances[name], response = made if isinstance(made, tuple) else (made, "")
            self.releases.push_async_callback(self._use, name, "release", self.instances[name])
            said.append(await self._seen(name, await self._read(name, response)))
        self.messages[-1]["content"] = _joined(said)

    async def _has_calls(self) -> bool:
        """Let the model answer."""
        self.state = State.RUNNING
        turn = await self.session.chat(
            self.messages, [tool.tool_schema.offered() for tool in self.tools.values()]
        )
        self.messages.append(turn.message)
        return bool(turn.tool_calls or turn.malformed)

    async def _execute(self) -> None:
        """Execute all calls of the last turn at the same time. The model reads their results, or what was wrong."""
        self.state, turn = State.TOOL_CALLING, self.session.turns[-1]
        answers = await asyncio.gather(
            *(self._call(**made["function"]) for made in turn.tool_calls)
        )
        for made, answer in zip(turn.tool_calls, answers, strict=True):
            whose = {"tool_call_id": made["id"], "name": made["function"]["name"]}
            self.messages.append({"role": "tool", **whose, "content": answer.content})
            self._keep(made["function"]["name"], answer.reward)
        if turn.malformed:
            said = self._error(f"a tool call could not be read: {turn.malformed}")
            self.messages.append({"role": "user", "content": said})

    async def _call(self, name: str, arguments: str) -> Answer:
        """Result of a call, or an error that the model reads."""
        if name not in self.tools:
            return Answer(
                self._error(f"there is no tool {name!r}; there are: {', '.join(self.tools)}")
            )
        takes_text = [*signature(self.tools[name].execute).parameters.values()][1].annotation in (
            str,
            "str",
        )
        given = arguments if takes_text else json.loads(arguments)
        try:
            result = await self._use(name, "execute", self.instances[name], given)
            response, reward, metrics = (
                (*result, None, None)[:3] if isinstance(result, tuple) else (result, None, None)
            )
            answer = Answer(
                await self._seen(name, await self._read(name, response)), _number(name, reward)
            )
        except ToolError as error:
            if name not in self.agent.failing:
                self.agent.failing.add(name)
                logger.warning(
                    "the tool %s; the model reads that, agent/tool_errors counts it", error
                )
            return Answer(await self._cut(self._error(str(error))))
        measured = metrics.items() if isinstance(metrics, Mapping) else ()
        self.session.metrics |= {
            f"{name}/{key}": n for key, n in measured if isinstance(n, int | float)
        }
        return answer

    async def _use(self, name: str, method: str, *arguments: Any) -> Any:
        """Result of a tool's method, with the arguments of the row; ``ToolError`` if it raises or takes too long."""
        work, seconds = getattr(self.tools[name], method), self.agent.options.tool_timeout
        given = self.given.get(name, {}).get(f"{method}_kwargs", {})
        try:
            if method == "create":
                given = create_arguments(work, given)
            async with asyncio.timeout(seconds):
                return await call(work, *arguments, **given)
        except (Exception, SystemExit) as error:
            late = isinstance(error, TimeoutError) and not str(error)
            what = f"no result within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
            raise ToolError(f"{name}.{method}: {what}") from error

    def _keep(self, name: str, reward: float | None) -> None:
        """Record a tool's reward, and add it to that of the last turn unless ``--tool_rewards`` is none."""
        if reward is None:
            return
        self.session.tool_rewards.setdefault(name, []).append(reward)
        if self.agent.options.tool_rewards == "add":
            self.session.add_turn_reward(reward)

    async def _read(self, name: str, response: Any) -> Content:
        """What a tool returned: its images, and the beginning of its text."""
        given = vars(response) if isinstance(response, ToolResponse) else response
        made = given if isinstance(given, Mapping) else {"text": given}
        images = made.get("image") or []
        if images and self.session.setup.renderer.vision is None:
            if name not in self.agent.failing:
                self.agent.failing.add(name)
                logger.warning(
                    "the tool %s returns images, and --pretrain reads none: they are left out", name
                )
            images = []
        text = (
            made.get("text") or ""
            if images or isinstance(response, ToolResponse)
            else made.get("text")
        )
        if not isinstance(text, str) or made.get("video"):
            raise ToolError(
                f"{name}: {shortened(response)} is no text, dict with 'text' or 'image', or ToolResponse"
            )
        parts = [
            {"type": "image", "image": image}
            for image in (images if isinstance(images, list) else [images])
        ]
        return _joined([parts, await self._cut(text)])

    async def _seen(self, name: str, content: Content) -> Content:
        """``content`` with its images processed; ``ToolError`` for one that cannot be read."""
        try:
            read: Content = (await self.session.images.read({"content": content}))["content"]
        except ValueError as error:
            raise ToolError(f"{name}: {error}") from error
        return read

    def _error(self, what: str) -> str:
        """Count an error and say it to the model."""
        self.session.counts["tool_errors"] += 1
        return f"Error: {what}"

    async def _cut(self, text: str) -> str:
        """``text``, or its beginning of ``--max_tool_response_tokens`` with a mark."""
        renderer, most = self.session.setup.renderer, self.agent.options.max_tool_response_tokens
        text = text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
        start = text[: most * 64]  # of a huge result only the beginning
        ids = await renderer.aside(partial(encode_bare, renderer.tokenizer, start), len(start))
        short = len(ids) <= most and len(text) <= most * 64
        return text if short else renderer.decode(ids[:most]).rstrip("\ufffd") + " ... [cut]"


def _number(name: str, reward: Any) -> float | None:
    """The reward of the tool ``name`` as a number, or None for none; ``ToolError`` for anything else."""
    try:
        return None if reward is None else finite_reward(reward)
    except ValueError as error:
        raise ToolError(f"{name}: {error}") from error


def _joined(contents: Sequence[Content | None]) -> Content:
    """Contents one after the other, with an empty line between texts; a text if all are."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(map(str, given))
    parts: list[dict[str, Any]] = []
    for content in given:
        if parts and parts[-1]["type"] == "text" and isinstance(content, str):
            content = f"\n\n{content}"
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def present(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is not null, which Parquet puts for what is missing."""
    return {name: value for name, value in (given or {}).items() if value is not None}


def arguments_of(row: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Arguments of a row by tool and by "create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"."""
    tools = present(present(extra_info(row)).get("tools_kwargs"))
    return {
        tool: {part: present(given) for part, given in parts.items()}
        for tool, parts in tools.items()
    }


def create_arguments(create: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given``, with an id and all of it as ``create_kwargs`` (verl's loop) where ``create`` takes these."""
    parameters = signature(create).parameters.values()
    taken = {parameter.kind is parameter.VAR_KEYWORD or parameter.name for parameter in parameters}
    more = {"instance_id": uuid4().hex, "create_kwargs": given}
    return {name: value for name, value in more.items() if taken & {True, name}} | given
