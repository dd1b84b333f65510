"""One episode's conversation with the model: every turn continues the recorded token ids."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from openppo.agents.matching import Tools, message_chain
from openppo.agents.renderer import Renderer
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message
from openppo.rollout.rollout import sample_seed
from openppo.rollout.sampling import text_before_stop
from openppo.types import Completion, Ending, FinishReason, Prompt, SamplingParams


class Generate(Protocol):
    """Sample one completion of ``prompt_ids``; cancelling the coroutine frees its row.

    ``resume`` is ``Completion.parked`` of an earlier request, whose prompt and tokens ``prompt_ids`` begin with.
    """

    def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, resume: int | None = None
    ) -> Awaitable[Completion]: ...


@dataclass(frozen=True)
class Task:
    """What an agent is given: a row, and the seed of this sample of it. ``task["column"]`` is the row's value.

    ``env_seed`` is that of an environment, the same for all samples of a row.
    """

    prompt: Prompt
    seed: int
    env_seed: int = 0

    def __getitem__(self, column: str) -> Any:
        return self.prompt.row[column]

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        return self.prompt.messages or [{"role": "user", "content": self.prompt.text}]


@dataclass(frozen=True)
class SessionSetup:
    """What the sessions of a rollout share. ``longest`` and ``context`` bound the tokens of a conversation."""

    renderer: Renderer
    generate: Generate
    params: SamplingParams
    options: AgentConfig
    longest: int
    context: int | None = None
    version: Callable[[], int] = lambda: 0


@dataclass(eq=False)
class Turn:
    """One answer of the model, committed: ``message`` in OpenAI's form, and the tokens that were read and sampled.

    ``messages`` and ``tools`` are what was asked with. ``parent`` is the turn whose tokens ``prompt_ids`` begin with;
    None if the conversation was rendered whole. ``malformed`` says why a tool call could not be read.
    """

    number: int
    messages: list[Message]
    tools: Tools
    prompt_ids: list[int]
    completion: Completion
    message: Message
    text: str
    version: int
    finish_reason: FinishReason
    parent: "Turn | None" = None
    malformed: str | None = None
    reward: float = 0.0
    trained: bool = True

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        return self.prompt_ids + self.completion.token_ids

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls in OpenAI's form."""
        return list(self.message.get("tool_calls") or [])


class EpisodeEnded(Exception):  # noqa: N818 (nothing need be wrong)
    """The episode has ended as ``ending`` says: the model answers no more."""

    def __init__(self, ending: Ending, what: str = "") -> None:
        super().__init__(what or ending.value)
        self.ending = ending


@dataclass(eq=False)
class Session:
    """What an agent talks to. Several branches may be open at a time: any recorded conversation can be continued.

    Sampled tokens are never tokenized again. A request whose messages begin with a recorded conversation continues its
    tokens; what cannot be bridged is rendered whole and begins a new segment.
    """

    setup: SessionSetup
    task: Task
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)
    """Of the whole episode, by name."""
    ending: Ending | None = None
    output: str = ""
    """Last lines of a program, or what an environment said last, for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that an agent measures, by name."""
    _begun: int = 0  # turns, those that were cancelled not counted
    _numbers: Iterator[int] = field(default_factory=count)
    _recorded: dict[str, list[Turn]] = field(default_factory=dict)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """The model's answer to ``messages``; raises ``EpisodeEnded`` where a limit ends the episode.

        ``ValueError`` for messages that the chat template refuses.
        """
        asked, offered = [dict(message) for message in messages], list(tools or ())
        prompt_ids, parent = self._prompt(asked, offered)
        return await self._sample(prompt_ids, parent, asked, offered, max_tokens, tuple(stop))

    async def extend(
        self,
        turn: Turn,
        token_ids: Sequence[int],
        message: Message,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """The model's answer after ``token_ids``, the tokens of ``message``, are appended to a recorded turn."""
        messages = [*turn.messages, turn.message, message]
        return await self._sample(turn.token_ids + list(token_ids), turn, messages, turn.tools, max_tokens, tuple(stop))

    async def begin(self, token_ids: Sequence[int], messages: Sequence[Message]) -> Turn:
        """The model's answer to a prompt that is tokenized already."""
        return await self._sample(list(token_ids), None, list(messages), [])

    def reward(self, value: float, turn: Turn | None = None, name: str = "reward") -> None:
        """Give ``turn`` a reward, or the whole episode; the last one counts."""
        if turn is None:
            self.rewards[name] = float(value)
        else:
            turn.reward = float(value)
            self.counts["rewarded_turns"] += 1

    def close(self, ending: Ending) -> None:
        """End the episode; the first ending stands."""
        if self.ending is None:
            self.ending = ending

    def add_turn_reward(self, value: float, turn: Turn | None = None) -> None:
        """Add to the reward of ``turn``, or of the last one; without a turn to that of the episode."""
        if self.turns:
            turn = turn or self.turns[-1]
            self.reward(turn.reward + value, turn)
        else:
            self.rewards["reward"] = self.rewards.get("reward", 0.0) + float(value)

    def _prompt(self, messages: list[Message], tools: Tools) -> tuple[list[int], Turn | None]:
        """Token ids of a request, and the turn whose tokens they continue."""
        renderer = self.setup.renderer
        if self.setup.options.history == "template":
            ids = renderer.render(messages, tools)
            ours = [turn for turn in self.turns if ids[: len(turn.token_ids)] == turn.token_ids]
            return ids, self._counted(max(ours, key=lambda turn: len(turn.token_ids), default=None))
        parent, n_known = self._longest_recorded(messages, tools)
        new = messages[n_known:]
        if parent is not None and all(message["role"] != "assistant" for message in new):
            bridge = renderer.bridge(parent.messages, parent.message, parent.completion, new, tools)
            if bridge is not None:
                return parent.token_ids + bridge, self._counted(parent)
        self._counted(None)
        return renderer.render(messages, tools), None

    def _counted(self, parent: Turn | None) -> Turn | None:
        """Count how a prompt was made; the first of an episode has nothing to continue."""
        if parent is not None:
            self.counts["bridged_turns"] += 1
        elif self.turns:
            self.counts["rerendered_turns"] += 1
        return parent

    def _longest_recorded(self, messages: Sequence[Message], tools: Tools) -> tuple[Turn | None, int]:
        """The turn that answered the longest beginning of ``messages``, and how many of them that is, with it."""
        chain = message_chain(messages, tools)
        for n in range(len(messages) - 1, 0, -1):
            if found := self._recorded.get(chain[n]):
                echoed = {call.get("id") for call in messages[n - 1].get("tool_calls") or []}
                same = [turn for turn in found if {call["id"] for call in turn.tool_calls} == echoed]
                return (same or found)[-1], n
        return None, 0

    async def _sample(
        self,
        prompt_ids: list[int],
        parent: Turn | None,
        messages: list[Message],
        tools: Tools,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> Turn:
        setup, params = self.setup, self._limited(len(prompt_ids), max_tokens, stop)
        number = next(self._numbers)
        self._begun += 1
        resume, seed = None if parent is None else parent.completion.parked, sample_seed(self.task.seed, number)
        try:
            completion = await setup.generate(prompt_ids, params, seed, resume)
        except BaseException:
            self._begun -= 1  # cancelled: a client that hung up may ask again
            raise
        if self.ending is not None:
            raise EpisodeEnded(self.ending)
        turn = self._committed(number, prompt_ids, parent, messages, tools, completion, params)
        self.turns.append(turn)
        chain = message_chain([*messages, turn.message], tools)
        self._recorded.setdefault(chain[-1], []).append(turn)
        return turn

    def _limited(self, n_prompt: int, max_tokens: int | None, stop: tuple[str, ...]) -> SamplingParams:
        """Sampling parameters of a turn after ``n_prompt`` tokens; ``EpisodeEnded`` if there is no room for one."""
        setup = self.setup
        if self.ending is None and self._begun >= setup.options.max_turns:
            self.close(Ending.MAX_TURNS)
        if self.ending is None and setup.context is not None and n_prompt >= setup.context:
            self.close(Ending.CONTEXT_FULL)
        if self.ending is None and n_prompt >= setup.longest:
            self.close(Ending.EPISODE_LENGTH)
        if self.ending is not None:
            raise EpisodeEnded(self.ending)
        room = min(setup.longest, setup.context or setup.longest) - n_prompt
        most = min(n for n in (room, setup.params.max_new_tokens, max_tokens) if n is not None)
        least = min(setup.params.min_new_tokens, most)
        stops = tuple(dict.fromkeys((*setup.params.stop, *stop)))
        return replace(setup.params, max_new_tokens=most, min_new_tokens=least, stop=stops)

    def _committed(
        self,
        number: int,
        prompt_ids: list[int],
        parent: Turn | None,
        messages: list[Message],
        tools: Tools,
        completion: Completion,
        params: SamplingParams,
    ) -> Turn:
        renderer = self.setup.renderer
        text = text_before_stop(renderer.text(completion), completion.token_ids, params, renderer.decode)
        parsed = renderer.parse(text, prompt_ids, tools, number)
        if parsed.error is not None:
            self.counts["malformed_calls"] += 1
        calls = bool(parsed.message.get("tool_calls"))
        called = calls and completion.finish_reason is FinishReason.STOP
        return Turn(
            number=number,
            messages=messages,
            tools=tools,
            prompt_ids=prompt_ids,
            completion=completion,
            message=parsed.message,
            text=text,
            version=self.setup.version(),
            finish_reason=FinishReason.TOOL_CALL if called else completion.finish_reason,
            parent=parent,
            malformed=parsed.error,
        )
