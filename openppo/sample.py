"""Samples: what one seed makes of one prompt, in however many turns, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openppo.endings import Ending, FinishReason
from openppo.media import Media, Tokens


@dataclass(frozen=True)
class Prompt:
    """One prompt: ``text`` is for people and rewards, ``token_ids`` for the model.

    >>> Prompt("17 + 25 =", token_ids=[28, 14, 60, 3], label="42", source="sums").label
    '42'
    """

    text: str
    token_ids: list[int]
    label: Any = None  # value of the label column
    row: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None  # the chat that ``text`` was rendered from
    source: str = ""  # name of the data set
    index: int = 0  # number of the row in the data set, from 0
    task: str = ""  # name of its task, in a run with several tasks
    media: Media = ()  # images; their placeholders are among ``token_ids``


@dataclass(frozen=True)
class EpisodeInput:
    """Input of one sample: a prompt, and the seed of this sample; ``input["column"]`` is a value of the prompt's row.

    ``env_seed`` seeds an environment. It is the same for all samples of a prompt, which form a ``group``.

    >>> task = EpisodeInput(Prompt("2 + 2 =", [5, 6], row={"answer": "4"}), seed=7)
    >>> task["answer"], task.messages
    ('4', [{'role': 'user', 'content': '2 + 2 ='}])
    """

    prompt: Prompt
    seed: int
    env_seed: int = 0
    group: int = 0

    def __getitem__(self, column: str) -> Any:
        return self.prompt.row[column]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as chat messages, images included."""
        return self.prompt.messages or [{"role": "user", "content": self.prompt.text}]


@dataclass(frozen=True)
class Completion:
    """The response that an engine sampled for one prompt; its lists are equally long.

    >>> Completion([9, 1], [-0.7, -0.1], versions=[3, 3], finish_reason=FinishReason.STOP).token_ids
    [9, 1]
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]  # of the policy that sampled each token
    finish_reason: FinishReason
    # Handle of the cached keys and values of prompt and response; None if they were not kept.
    parked: int | None = None


@dataclass(frozen=True)
class Episode:
    """The agent's side of a sample: its conversation, and how it ended.

    >>> Episode([{"role": "user", "content": "hi"}], Ending.TIMEOUT, n_turns=2, error="30 s").failure
    'timeout: 30 s'
    """

    messages: list[dict[str, Any]]  # the whole conversation
    ending: Ending
    n_turns: int
    error: str = ""  # message of a failure
    # Text after the last turn: a program's last lines or an environment's last observation.
    output: str = ""
    # Rewards by tool: those of its calls in order, then that of its ``calc_reward``.
    tool_rewards: dict[str, list[float]] = field(default_factory=dict)
    # Numbers of events and measurements by name, such as calls of tools.
    counts: dict[str, float] = field(default_factory=dict)
    # Tokens that the policy sampled in each turn.
    turn_tokens: list[int] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """Ending of a failed episode, and the reason."""
        return f"{self.ending.value}: {self.error or self.output or 'no message'}"


@dataclass(frozen=True)
class Segment:
    """Tokens that a model reads in one row and a loss trains on, in lists of equal length.

    ``action_mask`` is True for tokens that the policy sampled, and False for those of prompts, tools and environments.
    ``log_probs`` belong to the distribution sampled from and ``versions`` to the policy that sampled; where the mask is
    False, they are 0.0 and -1.

    >>> segment = Segment(
    ...     token_ids=[5, 6, 9, 1],
    ...     action_mask=[False, False, True, True],
    ...     log_probs=[0.0, 0.0, -0.7, -0.1],
    ...     versions=[-1, -1, 3, 3],
    ...     n_prompt=2,
    ...     finish_reason=FinishReason.STOP,
    ... )
    >>> segment.response_ids, segment.spans
    ([9, 1], [(2, 4)])
    """

    token_ids: list[int]
    action_mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    n_prompt: int  # tokens before the first turn
    finish_reason: FinishReason
    media: Media = ()  # images; their placeholders are among ``token_ids``
    # Reward of each token; None if tokens have none.
    token_rewards: list[float] | None = None
    # Tokens at which a step ends and gets its reward; None if each action is a step.
    step_ends: list[bool] | None = None
    # Actions that the losses train on, stale ones excluded; None: all actions.
    trained_mask: list[bool] | None = None

    def __post_init__(self) -> None:
        lists = (self.token_ids, self.action_mask, self.log_probs, self.versions)
        optional = (self.token_rewards, self.step_ends, self.trained_mask)
        lengths = {len(entries) for entries in (*lists, *optional) if entries is not None}
        assert len(lengths) == 1, f"unequal lengths {lengths}"

    @classmethod
    def of_response(cls, prompt: Tokens, completion: Completion) -> Segment:
        """Return a segment of one turn, in which all tokens of ``completion`` are actions."""
        prompt_ids = list(prompt.token_ids)
        n_response = len(completion.token_ids)
        return cls(
            token_ids=prompt_ids + completion.token_ids,
            action_mask=[False] * len(prompt_ids) + [True] * n_response,
            log_probs=[0.0] * len(prompt_ids) + completion.log_probs,
            versions=[-1] * len(prompt_ids) + completion.versions,
            n_prompt=len(prompt_ids),
            finish_reason=completion.finish_reason,
            media=prompt.media,
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and stop (exclusive) of each run of action tokens, in order."""
        padded = [False, *self.action_mask, False]
        edges = [t for t in range(len(padded) - 1) if padded[t] != padded[t + 1]]
        starts = edges[::2]
        stops = edges[1::2]
        return list(zip(starts, stops, strict=True))

    @property
    def loss_mask(self) -> list[bool]:
        """Mask of the actions that the losses train on."""
        return self.action_mask if self.trained_mask is None else self.trained_mask

    @property
    def n_actions(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.action_mask)

    @property
    def action_ids(self) -> list[int]:
        """Token ids that the policy sampled, in all spans."""
        pairs = zip(self.token_ids, self.action_mask, strict=True)
        return [token_id for token_id, is_action in pairs if is_action]

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids before the first turn."""
        return self.token_ids[: self.n_prompt]

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt, for people to read; includes what an environment wrote between turns."""
        return self.token_ids[self.n_prompt :]

    @property
    def step_rewards(self) -> list[float]:
        """Reward of each step in order, or of each action if no steps are known."""
        if self.token_rewards is None:
            return []

        ends = self.step_ends or self.action_mask
        tokens = zip(self.token_rewards, ends, self.action_mask, strict=True)
        return [reward for reward, is_end, is_action in tokens if is_end and is_action]


@dataclass(frozen=True)
class Sample:
    """One seed's answer to one prompt, however many turns it took; a single response has one segment.

    Rewards, groups, baselines and filters count samples; forwards and losses run over segments. ``group`` is the number
    of the prompt, shared by all its samples. Nothing changes a sample: ``with_scores`` returns another one.

    >>> completion = Completion([9, 1], [-0.7, -0.1], [3, 3], finish_reason=FinishReason.STOP)
    >>> sample = Sample.of_response(Prompt("ab", token_ids=[5, 6]), completion, group=0)
    >>> sample.with_scores({"correct": 1.0}).total_reward({"correct": 2.0})
    2.0
    """

    prompt: Prompt
    group: int
    segments: Sequence[Segment]
    # Rewards of the whole sample, by name.
    scores: Mapping[str, float] = field(default_factory=dict)
    # Factor in the losses; nothing else uses it.
    weight: float = 1.0
    # The agent's side; None for a single response.
    episode: Episode | None = None
    # The greedy response to the same prompt, the same object for a whole group.
    greedy: Sample | None = None
    # Numbers from a reward function that are only logged.
    extras: Mapping[str, float] = field(default_factory=dict)
    # Texts from a reward function, for dumps and printed samples.
    notes: Mapping[str, str] = field(default_factory=dict)
    # Texts that end a response; the response includes the one that ended it.
    stop: tuple[str, ...] = ()
    # Error message of a failed reward function.
    reward_error: str | None = None

    def __post_init__(self) -> None:
        assert self.segments, "a sample has a segment"
        assert self.weight >= 0, f"negative weight {self.weight}"

    @classmethod
    def of_response(
        cls, prompt: Prompt, completion: Completion, group: int, stop: tuple[str, ...] = ()
    ) -> Sample:
        """Return the sample of a single response; ``stop`` are texts that end one."""
        return cls(prompt, group, [Segment.of_response(prompt, completion)], stop=stop)

    @classmethod
    def failed(cls, task: EpisodeInput, episode: Episode, read: Tokens | None = None) -> Sample:
        """Return the stand-in of a failed sample, for logs: without actions, of reward 0.

        ``read`` are the tokens of its first request; those of the prompt if it made none.
        """
        tokens: Tokens = task.prompt if read is None else read
        ids = list(tokens.token_ids) or [0]
        segment = Segment(
            token_ids=ids,
            action_mask=[False] * len(ids),
            log_probs=[0.0] * len(ids),
            versions=[-1] * len(ids),
            n_prompt=len(tokens.token_ids),
            finish_reason=FinishReason.ABORT,
            media=tokens.media,
        )
        return cls(task.prompt, task.group, [segment], scores={"reward": 0.0}, episode=episode)

    @property
    def last(self) -> Segment:
        """The segment that ends the sample, which rewards read."""
        return self.segments[-1]

    @property
    def n_actions(self) -> int:
        """Number of tokens that the policy sampled, in all segments."""
        return sum(segment.n_actions for segment in self.segments)

    @property
    def fractions(self) -> list[float]:
        """Fraction of the sample's actions in each segment, by which sequence-level losses weight it."""
        if self.n_actions == 0:
            return [1.0 for _ in self.segments]
        return [segment.n_actions / self.n_actions for segment in self.segments]

    @property
    def is_trained(self) -> bool:
        """True unless its episode failed."""
        return self.episode is None or self.episode.ending.is_trained

    @property
    def truncated(self) -> bool:
        """True if ``--generate_max_len`` cut the last answer; an episode's limits on turns or tokens do not count."""
        return self.truncates(self.last)

    def truncates(self, segment: Segment) -> bool:
        """True if ``--generate_max_len`` cut the answer that ends one of its segments."""
        at_limit = self.episode is not None and self.episode.ending.is_limit
        return segment.finish_reason is FinishReason.LENGTH and not at_limit

    @property
    def logged(self) -> dict[str, float | str]:
        """Numbers and texts that reward functions returned beside rewards, by name."""
        return {**self.extras, **self.notes}

    def with_scores(
        self, scores: Mapping[str, float], token_rewards: list[float] | None = None
    ) -> Sample:
        """Return a copy whose rewards are these and no others.

        ``scores`` are rewards of the whole by name, ``token_rewards`` those of the last segment's tokens: 0 outside its
        action mask, whatever they are there.
        """
        segments = [
            replace(segment, token_rewards=None, step_ends=None) for segment in self.segments
        ]
        if token_rewards is not None:
            pairs = zip(token_rewards, self.last.action_mask, strict=True)
            action_rewards = [reward if is_action else 0.0 for reward, is_action in pairs]
            segments[-1] = replace(segments[-1], token_rewards=action_rewards)
        return replace(self, segments=segments, scores=dict(scores), reward_error=None)

    def total_score(self, weights: Mapping[str, float]) -> float:
        """Sum the named scores, each times its weight (1 by default)."""
        return sum(score * weights.get(name, 1.0) for name, score in self.scores.items())

    def total_reward(self, weights: Mapping[str, float]) -> float:
        """Sum all rewards: the total score and the token rewards of all segments."""
        token_rewards = sum(sum(segment.token_rewards or []) for segment in self.segments)
        return self.total_score(weights) + token_rewards


def segments_of(samples: Sequence[Sample]) -> list[Segment]:
    """Return the segments of all samples, in order: the rows of their batch.

    >>> completion = Completion([9], [-0.7], [3], finish_reason=FinishReason.LENGTH)
    >>> samples = [Sample.of_response(Prompt("", [5]), completion, group=0)] * 2
    >>> len(segments_of(samples))
    2
    """
    return [segment for sample in samples for segment in sample.segments]


@dataclass(frozen=True)
class Score:
    """Rewards of one sample from one source; token rewards are those of its last segment's actions.

    >>> Score({"correct": 1.0}, notes={"answer": "42"}).rewards
    {'correct': 1.0}
    """

    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    step_ends: list[bool] | None = None
    failed: bool = False  # scoring failed, and a default reward stands in
    error: str = ""  # message if scoring failed
    extras: dict[str, float] = field(default_factory=dict)  # numbers that are only logged
    notes: dict[str, str] = field(default_factory=dict)  # texts for dumps and samples
