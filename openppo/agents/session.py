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
from openppo.agents.turn import Turn
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message, shortened
from openppo.media import TokenIds, distinct_ids
from openppo.rewards.scoring import LARGEST_REWARD
from openppo.rollout.sampling import text_before_stop
from openppo.rollout.seeds import sample_seed
from openppo.types import Completion, Ending, EpisodeInput, SamplingParams

T = TypeVar("T")
Generate = Callable[..., Awaitable[Completion]]
"""``generate(prompt, params, seed, continue_from)`` samples one completion; cancelling the coroutine frees its row.

``prompt`` are ``TokenIds``. ``continue_from`` is ``Completion.parked`` of an earlier request; ``prompt`` then begins
with the tokens of that one's prompt and response.
"""


@dataclass(frozen=True)
class SessionSetup:
    """Settings that the sessions of a rollout share.

    ``longest`` and ``context`` bound the tokens of a conversation. ``stood`` returns the engine's idle seconds so far,
    which are excluded from time limits.
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
        """Maximum of tokens in a conversation under both bounds."""
        return min(self.longest, self.context or self.longest)

    def sampling_params(
        self, n_prompt: int, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> SamplingParams:
        """Return the sampling parameters of a turn after ``n_prompt`` tokens."""
        limits = [self.most - n_prompt, self.params.max_new_tokens]
        if max_tokens is not None:
            limits.append(max_tokens)
        most = min(limits)
        if type(most) is not int or most < 1:
            raise ValueError(f"max_tokens {max_tokens}: a positive whole number is needed")

        texts = (stop,) if isinstance(stop, str) else stop
        stops = dict.fromkeys((*self.params.stop, *filter(None, texts)))
        return replace(
            self.params,
            max_new_tokens=most,
            min_new_tokens=min(self.params.min_new_tokens, most),
            stop=tuple(stops),
        )


class Limits(TypedDict, total=False):
    """Limits of one request, in addition to the run's: a number of tokens, and texts that end the answer."""

    max_tokens: int | None
    stop: str | Sequence[str]


MAX_REWARDS = 64
"""Maximum of named rewards in an episode; each becomes a metric."""
MAX_NAME_LENGTH = 100


def finite_reward(value: Any) -> float:
    """Convert ``value`` to float; ``ValueError`` unless it is a finite number within the range of float32."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except OverflowError:  # an int that is too large
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:  # also for NaN
        raise ValueError(
            f"the reward {shortened(value)} is no finite number of at most {LARGEST_REWARD}"
        )
    return number


class EpisodeEnded(Exception):  # noqa: N818 (nothing need be wrong)
    """Raised when an answer is requested after the episode has ended with ``ending``."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.value)
        self.ending = ending


@dataclass(eq=False)
class Session:
    """An agent's conversation with the model.

    Any recorded branch can be continued, several of them at the same time. Only sampled tokens are trained on. A
    request whose messages begin with a recorded conversation continues the tokens of that conversation. A request that
    cannot be bridged is rendered whole and begins a new segment.
    """

    setup: SessionSetup
    task: EpisodeInput
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of the whole episode, by name."""
    tool_rewards: dict[str, list[float]] = field(default_factory=dict)
    """Rewards by tool, kept for ``Episode`` even if they are not added to rewards of turns."""
    ending: Ending | None = None
    output: str = ""
    """Last lines of a program, or the last observation of an environment, for people."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that an agent measures, by name."""
    images: Images = field(init=False)
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        setup = self.setup
        self.images = Images(
            setup.renderer.vision, self.task.prompt, setup.options.allow_image_urls
        )

    @property
    def leaves(self) -> list[Turn]:
        """Last turn of each branch: those that no other turn continues."""
        continued = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in continued]

    async def chat(
        self, messages: Sequence[Message], tools: Tools | None = None, **limits: Unpack[Limits]
    ) -> Turn:
        """Return the model's answer to ``messages``; ``EpisodeEnded`` if a limit ends the episode.

        ``ValueError`` for messages that the chat template rejects.
        """
        self._check_limits(0)
        conversation = [await self.images.read(message) for message in messages]
        offered = list(tools or ())
        prompt, parent = await self._prompt(conversation, offered)
        return await self._sample(prompt, parent, conversation, tools=offered, limits=limits)

    async def extend(
        self,
        turn: Turn | None,
        token_ids: Sequence[int],
        message: Message,
        **limits: Unpack[Limits],
    ) -> Turn:
        """Return the model's answer to ``message``, encoded as ``token_ids``, after ``turn`` (None: at the start).

        ``EpisodeEnded`` if a limit ends the episode.
        """
        if turn is None:
            first = TokenIds(token_ids)
            return await self._sample(first, None, [message], tools=[], limits=limits)
        prompt = TokenIds([*turn.token_ids, *token_ids])
        messages = [*turn.messages, message]
        return await self._sample(prompt, turn, messages, tools=turn.tools, limits=limits)

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; ``EpisodeEnded`` if it is certain to exceed a limit."""
        return await self._aside(partial(self.setup.renderer.encode, text), len(text))

    def reward(self, value: float, turn: Turn | None = None, name: str = "reward") -> None:
        """Set the reward of ``turn``, or one of the whole episode; a later one of that name replaces it.

        ``ValueError`` if it is not finite, or if names of rewards are too many or too long.
        """
        if turn is None:
            self.reward_all({name: value})
        else:
            self._reward_turn(turn, finite_reward(value))

    def reward_all(self, named: Mapping[str, float]) -> None:
        """Set rewards of the whole episode by name; a ``ValueError`` leaves all of them unset."""
        rewards = {name: finite_reward(value) for name, value in named.items()}
        longest_name = max(rewards, key=len, default="")
        if len(longest_name) > MAX_NAME_LENGTH or len(self.rewards | rewards) > MAX_REWARDS:
            raise ValueError(
                f"reward {shortened(longest_name)}: an episode has at most {MAX_REWARDS} named rewards, with names of "
                f"at most {MAX_NAME_LENGTH} letters"
            )
        self.rewards |= rewards

    def add_turn_reward(self, value: float) -> None:
        """Add ``value`` to the reward of the last turn, if any turn was played."""
        if self.turns:
            last = self.turns[-1]
            self._reward_turn(last, finite_reward(value) + last.reward)

    def _reward_turn(self, turn: Turn, reward: float) -> None:
        """Replace the reward of ``turn``, and count the turn with its first one."""
        if not turn.rewarded:
            self.counts["rewarded_turns"] += 1
        turn.record_reward(reward)

    def record_metrics(self, numbers: Mapping[str, float]) -> None:
        """Add numbers that an agent measures, by name; a later one of a name replaces it."""
        self.metrics |= numbers

    def record_output(self, text: str) -> None:
        """Replace the output of the program or environment."""
        self.output = text

    def close(self, ending: Ending) -> None:
        """End the episode; only the first ending counts."""
        self.ending = self.ending or ending

    def fail(self, ending: Ending) -> None:
        """End the episode with a failure, which replaces an earlier ending."""
        self.ending = ending

    async def _prompt(self, messages: list[Message], tools: Tools) -> tuple[TokenIds, Turn | None]:
        """Return the tokens of a request, and the turn whose tokens they continue."""
        renderer = self.setup.renderer
        media = self.images.of(messages)
        n_characters = len(repr((messages, tools)))
        render = partial(renderer.render, messages, tools, media)

        ids: list[int] | None = None
        if self.setup.options.history == "template":
            ids = await self._aside(render, n_characters)
            parent = self._longest_start(
                distinct_ids(TokenIds(ids, media)), lambda turn: turn.read_ids
            )
        else:
            hashes = await renderer.aside(partial(fingerprints, messages, tools), n_characters)
            parent = self._longest_start(hashes, lambda turn: turn.fingerprints)
            if parent is not None:
                ids = await self._bridged(parent, messages, tools, n_characters=n_characters)
            if ids is None:
                parent = None

        if self.turns:  # the first turn has nothing to continue
            self.counts["rerendered_turns" if parent is None else "bridged_turns"] += 1
        if ids is None:
            ids = await self._aside(render, n_characters)
        return TokenIds(ids, media), parent

    async def _bridged(
        self, parent: Turn, messages: list[Message], tools: Tools, n_characters: int
    ) -> list[int] | None:
        """Return a request's token ids as a continuation of ``parent``; None if it must be rendered whole."""
        new = messages[len(parent.messages) :]
        bridge = partial(
            self.setup.renderer.bridge,
            parent.messages,
            parent.completion,
            new,
            tools=tools,
            media=self.images.of(new),
        )
        new_ids = await self._aside(bridge, n_characters)
        return None if new_ids is None else parent.token_ids + new_ids

    async def _aside(self, encode: Callable[..., T], n_characters: int) -> T:
        """Return the result of ``encode``, run in a thread if slow; ``EpisodeEnded`` for too many tokens."""
        if n_characters > SHORT:
            encode = partial(encode, most=self.setup.most)
        try:
            return await self.setup.renderer.aside(encode, n_characters)
        except TooLong as error:
            self._check_limits(error.n_tokens)
            raise

    def _longest_start(
        self, request: list[int], record_of: Callable[[Turn], list[int]]
    ) -> Turn | None:
        """Return the turn whose record is the longest one with which ``request`` begins; None without any."""
        longest: Turn | None = None
        n_longest = -1
        for turn in self.turns:
            record = record_of(turn)
            if len(record) > n_longest and request[: len(record)] == record:
                longest = turn
                n_longest = len(record)
        return longest

    async def _sample(
        self,
        prompt: TokenIds,
        parent: Turn | None,
        conversation: list[Message],
        tools: Tools,
        limits: Limits,
    ) -> Turn:
        """Sample the next turn; record it unless the episode has ended in the meantime."""
        prompt_ids = list(prompt.token_ids)
        self._check_limits(len(prompt_ids))
        params = self.setup.sampling_params(len(prompt_ids), **limits)
        number = next(self._numbers)
        seed = sample_seed(self.task.seed, number)
        continue_from = None if parent is None else parent.completion.parked
        completion = await self.setup.generate(prompt, params, seed, continue_from)
        self._check_limits(len(prompt_ids))

        renderer = self.setup.renderer
        text = text_before_stop(
            renderer.text(completion), completion.token_ids, params, decode=renderer.decode
        )
        message, malformed = renderer.parse(text, prompt_ids, tools, number=number)
        self.counts["malformed_calls"] += malformed is not None
        messages = [*conversation, message]
        turn = Turn(
            number,
            messages,
            tools,
            prompt_ids=prompt_ids,
            completion=completion,
            text=text,
            fingerprints=fingerprints(messages, tools),
            parent=parent,
            malformed=malformed,
            media=prompt.media,
        )
        self.turns.append(turn)
        return turn

    def _check_limits(self, n_prompt: int) -> None:
        """Raise ``EpisodeEnded`` if the episode has ended, or a turn after ``n_prompt`` tokens would exceed a limit."""
        setup = self.setup
        if len(self.turns) >= setup.options.max_turns:
            self.close(Ending.MAX_TURNS)
        elif setup.context is not None and n_prompt >= setup.context:
            self.close(Ending.CONTEXT_FULL)
        elif n_prompt >= setup.longest:
            self.close(Ending.EPISODE_LENGTH)
        if self.ending is not None:
            raise EpisodeEnded(self.ending)
