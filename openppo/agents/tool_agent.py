"""Agent that executes a model's tool calls until it answers without one."""

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
from openppo.agents.session import EpisodeEnded, Session, finite_reward
from openppo.agents.tools import BaseTool, ToolResponse
from openppo.config.agents import AgentConfig
from openppo.datasets.row_formats import extra_info
from openppo.datasets.templates import encode_bare, shortened
from openppo.types import EpisodeInput, Prompt
from openppo.user_code import call

Content = str | list[dict[str, Any]]
"""Content of a message: a text, or a list of parts, each a text or an image."""


class Answer(NamedTuple):
    """Result of a tool call: the content for the model, and the reward, if there is one."""

    content: Content
    reward: float | None = None


class State(Enum):
    """States of an episode."""

    PENDING = "tools have no instances yet"
    RUNNING = "the model answers"
    TOOL_CALLING = "the calls in its answer are executed"
    COMPLETED = "the model answered without a call, or reached a limit"
    FAILED = "an exception was raised, or the episode was cancelled"


class ToolAgent(Agent):
    """Agent whose model may call ``tools``; a row may offer only some of them."""

    def __init__(self, tools: Sequence[BaseTool], options: AgentConfig) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.options = options
        has_calc_reward = any(type(tool).calc_reward is not BaseTool.calc_reward for tool in tools)
        self.gives_rewards = has_calc_reward and options.tool_rewards == "add"
        self._warned: set[str] = set()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check the tools and chats of rows, and warn of rows that lack required arguments.

        ``ValueError`` for a row with an unknown tool, or whose chat ends in a turn of the assistant.
        """
        n_lacking = 0
        for prompt in prompts:
            row = f"row {prompt.index + 1} of {prompt.source}"
            if prompt.messages and prompt.messages[-1]["role"] == "assistant":
                raise ValueError(
                    f"--tools: the prompt of {row} ends in a turn of the assistant, which only runs without "
                    "--tools can continue. Remove that turn, or leave --tools out."
                )

            arguments = arguments_of(prompt.row)
            unknown = sorted(arguments.keys() - self.tools)
            if unknown:
                raise ValueError(
                    f"--tools has no tool {unknown[0]!r}, which {row} names in tools_kwargs. "
                    f"It has: {', '.join(self.tools)}. Correct the name."
                )
            needs_arguments = present(extra_info(prompt.row)).get("need_tools_kwargs")
            if needs_arguments and not arguments:
                n_lacking += 1

        if n_lacking:
            logger.warning(
                "%d of %d rows need tools_kwargs and have none: they play without",
                n_lacking,
                len(prompts),
            )

    async def run(self, task: EpisodeInput, session: Session) -> None:
        """Play an episode; its rewards belong to its turns."""
        await ToolEpisode(self, task, session).play()

    def warn_once(self, name: str, message: str, *values: object) -> None:
        """Log a warning about the tool ``name``, once per run."""
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(message, *values)


class ToolEpisode:
    """One episode of ``agent``, with the tools that its row offers and the row's arguments for them."""

    def __init__(self, agent: ToolAgent, task: EpisodeInput, session: Session) -> None:
        self.agent = agent
        self.session = session
        self.row_arguments = arguments_of(task.prompt.row)
        self.tools = agent.tools
        if self.row_arguments:
            self.tools = {
                name: tool for name, tool in agent.tools.items() if name in self.row_arguments
            }
        self.messages = [dict(message) for message in task.messages]
        self.instances: dict[str, str] = {}
        self.state = State.PENDING

    async def play(self) -> None:
        """Execute calls until the model makes none or reaches a limit, then collect rewards.

        The tools' instances are released however the episode ends.
        """
        try:
            async with AsyncExitStack() as self.releases:
                await self._create()
                with suppress(EpisodeEnded):  # a limit was reached, which the session has recorded
                    while await self._has_calls():
                        await self._execute()

                self.state = State.COMPLETED
                for name, instance in self.instances.items():
                    reward = await self._use(name, "calc_reward", instance)
                    self._record(name, _number(name, reward))
        except BaseException:
            self.state = State.FAILED
            raise

    async def _create(self) -> None:
        """Make an instance of each tool, and append the instances' first texts and images to the prompt."""
        contents = [self.messages[-1].get("content")]
        for name in self.tools:
            result = await self._use(name, "create")
            instance, response = result if isinstance(result, tuple) else (result, "")
            self.instances[name] = instance
            self.releases.push_async_callback(self._use, name, "release", instance)
            contents.append(await self._content(name, response))
        self.messages[-1]["content"] = _joined(contents)

    async def _has_calls(self) -> bool:
        """Sample an answer; return True if it has calls, well-formed or not."""
        self.state = State.RUNNING
        offered = [tool.tool_schema.offered() for tool in self.tools.values()]
        turn = await self.session.chat(self.messages, offered)
        self.messages.append(turn.message)
        return bool(turn.tool_calls or turn.malformed)

    async def _execute(self) -> None:
        """Execute all calls of the last turn at the same time; append their results or errors."""
        self.state = State.TOOL_CALLING
        turn = self.session.turns[-1]
        answers = await asyncio.gather(
            *(self._call(**tool_call["function"]) for tool_call in turn.tool_calls)
        )
        for tool_call, answer in zip(turn.tool_calls, answers, strict=True):
            name = tool_call["function"]["name"]
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": tool_call["id"],
                    "name": name,
                    "content": answer.content,
                }
            )
            self._record(name, answer.reward)

        if turn.malformed:
            error = self._error(f"a tool call could not be read: {turn.malformed}")
            self.messages.append({"role": "user", "content": error})

    async def _call(self, name: str, arguments: str) -> Answer:
        """Return the result of a call, or an error for the model."""
        if name not in self.tools:
            known = ", ".join(self.tools)
            return Answer(self._error(f"there is no tool {name!r}; there are: {known}"))

        takes_text = _takes_text(self.tools[name].execute)
        parameters = arguments if takes_text else json.loads(arguments)
        try:
            result = await self._use(name, "execute", self.instances[name], parameters)
            if not isinstance(result, tuple):
                result = (result,)
            # reward and metrics are optional
            response, reward, metrics = (*result, None, None)[:3]
            answer = Answer(await self._content(name, response), _number(name, reward))
        except ToolError as error:
            self.agent.warn_once(
                name, "the tool %s; the model reads that, agent/tool_errors counts it", error
            )
            return Answer(await self._cut(self._error(str(error))))

        if isinstance(metrics, Mapping):
            numbers = {key: n for key, n in metrics.items() if isinstance(n, int | float)}
            self.session.record_metrics({f"{name}/{key}": n for key, n in numbers.items()})
        return answer

    async def _use(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a tool's method, with the row's arguments; ``ToolError`` if it raises or takes too long."""
        function = getattr(self.tools[name], method)
        seconds = self.agent.options.tool_timeout
        row_arguments = self.row_arguments.get(name, {}).get(f"{method}_kwargs", {})
        try:
            if method == "create":
                row_arguments = create_arguments(function, row_arguments)
            async with asyncio.timeout(seconds):
                return await call(function, *arguments, **row_arguments)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and not str(error):
                problem = f"no result within {seconds:g} s"
            raise ToolError(f"{name}.{method}: {problem}") from error

    def _record(self, name: str, reward: float | None) -> None:
        """Record a tool's reward, and add it to the last turn's reward unless ``--tool_rewards`` is none."""
        if reward is None:
            return
        self.session.tool_rewards.setdefault(name, []).append(reward)
        if self.agent.options.tool_rewards == "add":
            self.session.add_turn_reward(reward)

    async def _content(self, name: str, response: Any) -> Content:
        """Return a tool's response as content for the model: processed images, then text cut to its limit.

        ``ToolError`` for a response of another type, or an image that cannot be read.
        """
        content = await self._parts(name, response)
        try:
            message = await self.session.images.read({"content": content})
        except ValueError as error:
            raise ToolError(f"{name}: {error}") from error
        processed: Content = message["content"]
        return processed

    async def _parts(self, name: str, response: Any) -> Content:
        """Return a response as content: unprocessed images, then text cut to its limit."""
        is_response = isinstance(response, ToolResponse)
        fields = vars(response) if is_response else response
        if not isinstance(fields, Mapping):
            fields = {"text": fields}

        images = fields.get("image") or []
        if images and self.session.setup.renderer.vision is None:
            self.agent.warn_once(
                name,
                "the tool %s returns images, and --pretrain reads none: they are left out",
                name,
            )
            images = []
        if not isinstance(images, list):
            images = [images]

        text = fields.get("text")
        if images or is_response:
            text = text or ""
        if not isinstance(text, str) or fields.get("video"):
            raise ToolError(
                f"{name}: {shortened(response)} is no text, dict with 'text' or 'image', or ToolResponse"
            )
        parts = [{"type": "image", "image": image} for image in images]
        return _joined([parts, await self._cut(text)])

    def _error(self, problem: str) -> str:
        """Count an error, and return it as a text for the model."""
        self.session.counts["tool_errors"] += 1
        return f"Error: {problem}"

    async def _cut(self, text: str) -> str:
        """Return ``text``, or its first ``max_tool_response_tokens`` and a mark."""
        renderer = self.session.setup.renderer
        most = self.agent.options.max_tool_response_tokens
        most_characters = most * 64  # only the beginning of a huge result is tokenized
        text = text.encode(errors="replace").decode()  # a lone surrogate cannot be tokenized
        start = text[:most_characters]
        ids = await renderer.aside(partial(encode_bare, renderer.tokenizer, start), len(start))
        if len(ids) <= most and len(text) <= most_characters:
            return text
        return renderer.decode(ids[:most]).rstrip("\ufffd") + " ... [cut]"


def _takes_text(execute: Callable[..., Any]) -> bool:
    """Return True if the second parameter of ``execute``, a call's arguments, is annotated as ``str``."""
    parameters = list(signature(execute).parameters.values())
    return parameters[1].annotation in (str, "str")


def _number(name: str, reward: Any) -> float | None:
    """Return the reward of the tool ``name`` as a number, or None; ``ToolError`` for anything else."""
    try:
        return None if reward is None else finite_reward(reward)
    except ValueError as error:
        raise ToolError(f"{name}: {error}") from error


def _joined(contents: Sequence[Content | None]) -> Content:
    """Join contents, texts with a blank line between them; the result is a text if all contents are."""
    nonempty = [content for content in contents if content]
    if all(isinstance(content, str) for content in nonempty):
        return "\n\n".join(map(str, nonempty))

    parts: list[dict[str, Any]] = []
    for content in nonempty:
        if not isinstance(content, str):
            parts += content
        elif parts and parts[-1]["type"] == "text":
            parts.append({"type": "text", "text": f"\n\n{content}"})
        else:
            parts.append({"type": "text", "text": content})
    return parts


def present(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop nulls; Parquet writes them for missing fields."""
    return {name: value for name, value in (fields or {}).items() if value is not None}


def arguments_of(row: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a row's arguments by tool, then by method.

    Methods are "create_kwargs", "execute_kwargs", "calc_reward_kwargs" and "release_kwargs".
    """
    arguments: dict[str, dict[str, dict[str, Any]]] = {}
    tools = present(present(extra_info(row)).get("tools_kwargs"))
    for tool, by_method in tools.items():
        arguments[tool] = {method: present(kwargs) for method, kwargs in by_method.items()}
    return arguments


def create_arguments(create: Callable[..., Any], row_arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``create``: those of verl's loop that it accepts, then the row's.

    verl's loop passes an ``instance_id``, and all of the row's arguments again as ``create_kwargs``.
    """
    parameters = signature(create).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    verl_arguments = {"instance_id": uuid4().hex, "create_kwargs": row_arguments}
    accepted = {
        name: value for name, value in verl_arguments.items() if takes_all or name in parameters
    }
    return accepted | row_arguments
