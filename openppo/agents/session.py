"""One episode's conversation with the model, over recorded token ids."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, SupportsFloat, TypedDict, TypeVar, Unpack

from openppo.agents.images import Images
from openppo.agents.parsers import Tools
from openppo.agents.renderer import SHORT, Renderer, TooLong, fingerprints
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, shortened
from openppo.media import Media, distinct_ids
from openppo.rewards.scoring import LARGEST_REWARD
from openppo.rollout.sampling import text_before_stop
from openppo.rollout.seeds import sample_seed
from openppo.types import Completion, Ending, FinishReason, Prompt, SamplingParams

T = TypeVar("T")
Generate = Callable[..., Awaitable[Completion]]
"""``generate(prompt_ids, params, seed, continue_from)`` samples one completion; cancelling the coroutine frees its row.

``continue_from`` is ``Completion.parked`` of an earlier request, whose prompt and tokens ``prompt_ids`` begin with. Of
a prompt with images it gets these, too: ``media``.
"""


@dataclass(frozen=True)
class Task:
    """What an agent is given: a row, and the seed of this sample of it. ``task["column"]`` is the row's value.

    ``env_seed`` is that of an environment, the same for all samples of a row, which are a ``group``.
    """

    prompt: Prompt
    seed: int
    env_seed: int = 0
    group: int = 0

    def __getitem__(self, column: str) -> Any:
        return self.prompt.row[column]

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages; what stands there for its images may be handed on to the model."""
        return self.prompt.messages or [{"role": "user", "content": self.prompt.text}]


@dataclass(frozen=True)
class SessionSetup:
    """What the sessions of a rollout share. ``longest`` and ``context`` bound the tokens of a conversation.

    ``stood`` are the seconds so far in which the engine was not driven: no time limit counts them.
    """

    renderer: Renderer
    generate: Generate
    params: SamplingParams
    options: AgentConfig
    longest: int
    context: int | None = None
    stood: Callable[[], float] = lambda: 0.0

    @property
    def most(self) -> int:
        """The lower of both bounds."""
        return min(self.longest, self.context or self.longest)


@dataclass(eq=False)
class Turn:
    """One answer of the model, committed, with the tokens that were read and sampled.

    ``messages`` are the conversation up to the answer, which is the last, and ``said`` the fingerprints of both and
    ``tools``. ``parent`` is the turn whose tokens ``prompt_ids`` begin with; None if the conversation was rendered
    whole. ``malformed`` says why a tool call could not be read. ``media`` are the images of ``prompt_ids``.
    """

    number: int
    messages: list[Message]
    tools: Tools
    prompt_ids: list[int]
    completion: Completion
    text: str
    said: list[int]
    parent: "Turn | None" = None
    malformed: str | None = None
    media: Media = ()
    reward: float = 0.0
    rewarded: bool = False
    trained: bool = True

    @property
    def message(self) -> Message:
        """The answer in OpenAI's form."""
        return self.messages[-1]

    @property
    def path(self) -> list["Turn"]:
        """The turns whose tokens this one continues, from the first on, and itself."""
        path, turn = [self], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        return self.prompt_ids + self.completion.token_ids

    @property
    def read_ids(self) -> list[int]:
        """``token_ids`` that tell images apart."""
        return distinct_ids(self.token_ids, self.media)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls in OpenAI's form."""
        return list(self.message.get("tool_calls") or [])

    @property
    def finish_reason(self) -> FinishReason:
        """That of the completion; ``TOOL_CALL`` if it stopped after calls."""
        called = self.tool_calls and self.completion.finish_reason is FinishReason.STOP
        return FinishReason.TOOL_CALL if called else self.completion.finish_reason


class Limits(TypedDict, total=False):
    """Limits of one request beside the run's: tokens, and texts that end the answer."""

    max_tokens: int | None
    stop: str | Sequence[str]


MAX_REWARDS = 64
"""Named rewards of an episode; each is a metric."""
MAX_NAME_LENGTH = 100


def finite_reward(value: Any) -> float:
    """``value`` as float; ``ValueError`` if it is no finite number that float32 can hold."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except OverflowError:  # of a whole number
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:  # of NaN too
        raise ValueError(
            f"the reward {shortened(value)} is no finite number of at most {LARGEST_REWARD}"
        )
    return number


class EpisodeEnded(Exception):  # noqa: N818 (nothing need be wrong)
    """The episode has ended as ``ending`` says: the model answers no more."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.value)
        self.ending = ending


@dataclass(eq=False)
class Session:
    """What an agent talks to. Several branches may be open at a time: any recorded conversation can be continued.

    Only sampled tokens are trained on. A request whose messages begin with a recorded conversation continues its
    tokens; what cannot be bridged is rendered whole and begins a new part.
    """

    setup: SessionSetup
    task: Task
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)
    """Of the whole episode, by name."""
    tool_rewards: dict[str, list[float]] = field(default_factory=dict)
    """As of ``Episode``, whether they are added or not."""
    ending: Ending | None = None
    output: str = ""
    """Last lines of a program, or what an environment said last, for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that an agent measures, by name."""
    images: Images = field(init=False)
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.images = Images(
            self.setup.renderer.vision, self.task.prompt, self.setup.options.allow_image_urls
        )

    @property
    def leaves(self) -> list[Turn]:
        """Turns that no other continues."""
        continued = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in continued]

    async def chat(
        self, messages: Sequence[Message], tools: Tools | None = None, **limits: Unpack[Limits]
    ) -> Turn:
        """The model's answer to ``messages``; raises ``EpisodeEnded`` where a limit ends the episode.

        ``ValueError`` for messages that the chat template refuses.
        """
        self._check_limits(0)
        asked, offered = (
            [await self.images.read(message) for message in messages],
            list(tools or ()),
        )
        prompt_ids, parent, media = await self._prompt(asked, offered)
        return await self._sample(
            prompt_ids, parent, asked, tools=offered, limits=limits, media=media
        )

    async def extend(
        self,
        turn: Turn | None,
        token_ids: Sequence[int],
        message: Message,
        **limits: Unpack[Limits],
    ) -> Turn:
        """The model's answer after ``token_ids``, the tokens of ``message``, behind a recorded turn or as the first."""
        if turn is None:
            return await self._sample(list(token_ids), None, [message], tools=[], limits=limits)
        read = [*turn.token_ids, *token_ids]
        return await self._sample(
            read, turn, [*turn.messages, message], tools=turn.tools, limits=limits
        )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text; ``EpisodeEnded`` for one that exceeds a limit for certain."""
        return await self._aside(partial(self.setup.renderer.encode, text), len(text))

    def reward(self, value: float, turn: Turn | None = None, name: str = "reward") -> None:
        """Give ``turn`` a reward, or the whole episode; the last one of a name counts.

        ``ValueError`` if it is not finite, or for more or longer names than metrics may have.
        """
        if turn is None:
            self.reward_all({name: value})
        else:
            reward = finite_reward(value)
            self.counts["rewarded_turns"] += not turn.rewarded
            turn.reward, turn.rewarded = reward, True

    def reward_all(self, named: Mapping[str, float]) -> None:
        """Give the whole episode rewards by name, all or, with a ``ValueError``, none."""
        rewards = {name: finite_reward(value) for name, value in named.items()}
        longest = max(rewards, key=len, default="")
        if len(longest) > MAX_NAME_LENGTH or len(self.rewards | rewards) > MAX_REWARDS:
            raise ValueError(
                f"reward {shortened(longest)}: an episode has at most {MAX_REWARDS} named rewards, with names of at "
                f"most {MAX_NAME_LENGTH} letters"
            )
        self.rewards |= rewards

    def add_turn_reward(self, value: float) -> None:
        """Add to the reward of the last turn, if there is one."""
        if self.turns:
            before = self.turns[-1].reward
            self.reward(value, self.turns[-1])
            self.turns[-1].reward += before

    def close(self, ending: Ending) -> None:
        """End the episode; the first ending stands."""
        self.ending = self.ending or ending

    async def _prompt(
        self, messages: list[Message], tools: Tools
    ) -> tuple[list[int], Turn | None, Media]:
        """Token ids of a request, the turn whose tokens they continue, and the images among them."""
        renderer = self.setup.renderer
        ids = None
        media = self.images.of(messages)
        n_characters = len(repr((messages, tools)))
        if self.setup.options.history == "template":
            ids = await self._aside(partial(renderer.render, messages, tools, media), n_characters)
            parent = self._longest(distinct_ids(ids, media), lambda turn: turn.read_ids)
        else:
            asked = await renderer.aside(partial(fingerprints, messages, tools), n_characters)
            parent = self._longest(asked, lambda turn: turn.said)
            if parent is not None:
                new = messages[len(parent.messages) :]
                bridge = partial(
                    renderer.bridge,
                    parent.messages,
                    parent.completion,
                    new,
                    tools=tools,
                    media=self.images.of(new),
                )
                after = await self._aside(bridge, n_characters)
                ids, parent = (None, None) if after is None else (parent.token_ids + after, parent)
        if self.turns:  # the first has nothing to continue
            self.counts["rerendered_turns" if parent is None else "bridged_turns"] += 1
        if ids is None:
            ids = await self._aside(partial(renderer.render, messages, tools, media), n_characters)
        return ids, parent, media

    async def _aside(self, encode: Callable[..., T], n_characters: int) -> T:
        """Result of ``encode``, beside the event loop if it is of many characters; ``EpisodeEnded`` for too many."""
        most = {} if n_characters <= SHORT else {"most": self.setup.most}
        try:
            return await self.setup.renderer.aside(partial(encode, **most), n_characters)
        except TooLong as error:
            self._check_limits(error.n_tokens)
            raise

    def _longest(self, asked: list[int], recorded: Callable[[Turn], list[int]]) -> Turn | None:
        """The turn with the longest record that ``asked`` begins with."""
        begun = [turn for turn in self.turns if asked[: len(recorded(turn))] == recorded(turn)]
        return max(begun, key=lambda turn: len(recorded(turn)), default=None)

    async def _sample(
        self,
        prompt_ids: list[int],
        parent: Turn | None,
        asked: list[Message],
        tools: Tools,
        limits: Limits,
        media: Media = (),
    ) -> Turn:
        """The next turn, committed if the episode has not ended meanwhile."""
        setup, renderer = self.setup, self.setup.renderer
        self._check_limits(len(prompt_ids))
        params, number = self._limited(len(prompt_ids), **limits), next(self._numbers)
        continue_from, seed = (
            None if parent is None else parent.completion.parked,
            sample_seed(self.task.seed, number),
        )
        more = {"media": media} if media else {}
        completion = await setup.generate(prompt_ids, params, seed, continue_from, **more)
        self._check_limits(len(prompt_ids))
        text = text_before_stop(
            renderer.text(completion), completion.token_ids, params, decode=renderer.decode
        )
        message, malformed = renderer.parse(text, prompt_ids, tools, number=number)
        self.counts["malformed_calls"] += malformed is not None
        messages = [*asked, message]
        said = fingerprints(messages, tools)
        turn = Turn(
            number,
            messages,
            tools,
            prompt_ids=prompt_ids,
            completion=completion,
            text=text,
            said=said,
            parent=parent,
            malformed=malformed,
            media=media,
        )
        self.turns.append(turn)
        return turn

    def _check_limits(self, n_prompt: int) -> None:
        """``EpisodeEnded`` if the episode has ended, or a turn after ``n_prompt`` tokens would exceed a limit."""
        setup = self.setup
        if len(self.turns) >= setup.options.max_turns:
            self.close(Ending.MAX_TURNS)
        elif setup.context is not None and n_prompt >= setup.context:
            self.close(Ending.CONTEXT_FULL)
        elif n_prompt >= setup.longest:
            self.close(Ending.EPISODE_LENGTH)
        if self.ending is not None:
            raise EpisodeEnded(self.ending)

    def _limited(
        self, n_prompt: int, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> SamplingParams:
        """Sampling parameters of a turn after ``n_prompt`` tokens."""
        setup, params = self.setup, self.setup.params
        room = setup.most - n_prompt
        most = min(n for n in (room, params.max_new_tokens, max_tokens) if n is not None)
        if type(most) is not int or most < 1:
            raise ValueError(f"max_tokens {max_tokens}: a positive whole number is needed")
        texts = (stop,) if isinstance(stop, str) else stop
        stops = tuple(dict.fromkeys((*params.stop, *filter(None, texts))))
        return replace(
            params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most), stop=stops
        )
