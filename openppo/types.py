"""The nouns that every part of OpenPPO shares.

Shape legend, used in all comments: B sequences, L padded tokens, V vocabulary, G samples per prompt.
Every per-token tensor is ``(B, L)`` and token-aligned: entry t is about token t. Sequences are padded on the right; no
mask is ever made by comparing ids with PAD or EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from openppo.endings import Ending as Ending
from openppo.endings import FinishReason as FinishReason
from openppo.media import Media


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """A signal, whose name is the argument, asked the run to stop; what was under way has been left."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a response. ``temperature`` 0 takes the likeliest token.

    EOS, a token of ``stop_token_ids`` and one that completes a text of ``stop`` end it and belong to it, once there are
    ``min_new_tokens``: before, EOS and those ids are not sampled.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Prompt:
    """One prompt: ``text`` is for people and rewards, ``token_ids`` is what the model reads.

    ``row`` is its data row, ``label`` the value of its label column, ``source`` the data set's name, ``index`` the
    row's place there (from 0), ``messages`` the chat that ``text`` was rendered from, ``task`` its task of several,
    ``media`` are its images, for which some of the tokens stand.
    """

    text: str
    token_ids: list[int]
    label: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    source: str = ""
    index: int = 0
    task: str = ""
    media: Media = ()


@dataclass(frozen=True)
class Completion:
    """Equally long lists of what an engine sampled for one prompt."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]  # of the policy
    finish_reason: FinishReason
    parked: int | None = (
        None  # handle of the keys and values that the engine keeps of both, if it was asked to
    )


@dataclass(frozen=True)
class Episode:
    """What an agent did: shared by the trajectories of its parts."""

    messages: list[dict[str, Any]]  # the whole conversation
    ending: Ending
    n_turns: int
    error: str = ""  # what went wrong
    output: str = (
        ""  # what followed the last turn: a program's last lines, an environment's last words
    )
    tool_rewards: dict[str, list[float]] = field(default_factory=dict)
    """By tool: rewards of its calls in their order, then that of its ``calc_reward``."""

    @property
    def failure(self) -> str:
        """How it ended and why, of one that failed."""
        return f"{self.ending.value}: {self.error or self.output or 'no message'}"


@dataclass
class Trajectory:
    """Tokens of one episode, or of a part of one, and what is known of each.

    Equally long lists: ``action_mask`` is set on tokens that the policy sampled, not on those of prompts, tools and
    environments; ``log_probs`` of the distribution sampled from and ``versions`` of the policy that sampled are 0.0 and
    -1 outside. ``trained_mask`` are the actions that losses read: without those that are too old (None: all actions).
    ``group`` identifies the prompt. ``weight`` scales the losses, and only that. ``share`` is a part's
    share of its episode's actions: rewards and groups count an episode once, losses of sequences by shares, all else
    each part. ``scores`` are rewards of the whole by name, ``token_rewards`` of single tokens (None: there are none),
    ``step_ends`` tokens that have one as a step ends there (None: every action). ``greedy``: the greedy response, in
    parts if it is an episode in parts.
    """

    token_ids: list[int]
    action_mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt: Prompt
    group: int
    weight: float = 1.0
    share: float = 1.0
    scores: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    step_ends: list[bool] | None = None
    greedy: tuple[Trajectory, ...] = ()
    episode: Episode | None = None  # of an agent
    extras: dict[str, float] = field(
        default_factory=dict
    )  # numbers of a reward function that are only logged
    notes: dict[str, str] = field(
        default_factory=dict
    )  # texts of a reward function, for dumps and samples
    trained_mask: list[bool] | None = None
    stop: tuple[str, ...] = ()  # texts that end a response, and belong to it
    reward_error: str | None = None  # why the reward function failed; None: it did not

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.action_mask),
            len(self.log_probs),
            len(self.versions),
        }
        assert len(lengths) == 1 and self.weight >= 0, (
            f"unequal lengths {lengths} or negative weight {self.weight}"
        )

    @property
    def logged(self) -> dict[str, float | str]:
        """Numbers and texts of reward functions that are no rewards, by name."""
        return {**self.extras, **self.notes}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of action tokens in order, each from its start up to, not including, its stop."""
        edges = [False, *self.action_mask, False]
        starts_and_stops = [t for t in range(len(edges) - 1) if edges[t] != edges[t + 1]]
        return list(zip(starts_and_stops[::2], starts_and_stops[1::2], strict=True))

    @property
    def loss_mask(self) -> list[bool]:
        """Actions that losses read."""
        return self.action_mask if self.trained_mask is None else self.trained_mask

    @property
    def truncated(self) -> bool:
        """Cut off by ``--generate_max_len``: limits of an episode, on turns or tokens, cut no answer off."""
        at_limit = self.episode is not None and self.episode.ending.is_limit
        return self.finish_reason is FinishReason.LENGTH and not at_limit

    @property
    def action_ids(self) -> list[int]:
        """Token ids that the policy sampled, of all spans."""
        return [
            token_id
            for token_id, is_action in zip(self.token_ids, self.action_mask, strict=True)
            if is_action
        ]

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt, for people to read: of several turns those of the environment are among them."""
        return self.token_ids[len(self.prompt.token_ids) :]

    @property
    def step_rewards(self) -> list[float]:
        """Rewards of the steps in order; of the actions where no steps are known."""
        if self.token_rewards is None:
            return []
        rows = zip(
            self.token_rewards, self.step_ends or self.action_mask, self.action_mask, strict=True
        )
        return [reward for reward, end, action in rows if end and action]

    def total_score(self, weights: Mapping[str, float]) -> float:
        """Sum of the named scores, each times its weight (1 where none is given)."""
        return sum(score * weights.get(name, 1.0) for name, score in self.scores.items())

    def total_reward(self, weights: Mapping[str, float]) -> float:
        """All that was earned: the score and the rewards of tokens."""
        return self.total_score(weights) + sum(self.token_rewards or [])


@dataclass(frozen=True)
class Score:
    """What a reward source gives one trajectory; only actions have rewards."""

    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    step_ends: list[bool] | None = None
    failed: bool = False  # a reward chosen beforehand stands in
    error: str = ""  # why it failed
    extras: dict[str, float] = field(default_factory=dict)  # logged, and no rewards
    notes: dict[str, str] = field(default_factory=dict)  # texts, which are no metrics either


@dataclass(frozen=True)
class Experience:
    """A batch of trajectories as tensors. Each stage returns a new object with more fields; none mutates.

    ``sequences`` int64, right-padded; ``attention_mask`` bool: a real token; ``action_mask`` bool: sampled and trained
    on. All others are float32 and 0 outside of it. All are (B, L) but ``truncated`` bool, ``scores``, all that was
    earned before shaping, ``weight`` and ``share`` (None: 1), which are (B,). ``staleness`` counts versions (None: 0).
    ``media`` are the images of each row, B of them or none at all.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    rollout_log_probs: Tensor
    truncated: Tensor
    weight: Tensor | None = None
    share: Tensor | None = None
    scores: Tensor | None = None
    log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    staleness: Tensor | None = None
    media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_mask.is_floating_point():
            order = "sequences, attention_mask, action_mask, rollout_log_probs, truncated"
            raise TypeError(
                f"attention_mask is {self.attention_mask.dtype}, no mask: the order is {order}. Use names."
            )

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def old_or_rollout_log_probs(self) -> Tensor:
        """``log_probs``; the engine's where the actor has not computed them yet."""
        return self.rollout_log_probs if self.log_probs is None else self.log_probs

    @property
    def model_inputs(self) -> dict[str, Any]:
        """What models get beside sequences and masks."""
        return {"media": self.media} if self.media else {}

    def with_fields(self, **tensors: Any) -> Experience:
        """A copy that has these fields too."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str, move: Callable[..., Tensor] = Tensor.to) -> Experience:
        """A copy on ``device``, where ``move`` takes each tensor."""
        return self.with_fields(
            **{name: move(tensor, device) for name, tensor in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}


class Comm(Protocol):
    """The process group, as far as code below the strategy needs to know it."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Combine a tensor over all ranks, ``op`` one of sum, max, min; returns a new tensor."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""


class SingleProcess:
    """``Comm`` of a program without a process group."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class StopCheck:
    """Where long work asks whether a signal stops it; this one, of a program without signals, never does."""

    def requested(self) -> bool:
        """Whether this rank knows of a signal; others may not know yet."""
        return False

    def __call__(self) -> None:
        """Raise ``Interrupted`` on all ranks if one of them knows of it. Collective."""


class RolloutSource(Protocol):
    """Where a trainer's trajectories come from. All ranks call every method together.

    Iterating gives this rank's scored trajectories of one global step after the other, groups whole. In a ``Rollout``
    scores are under way: a source over another calls ``wait_for_scores`` on all ranks first, or a signal reaches one.
    """

    @property
    def steps(self) -> int | None:
        """Global steps of the whole run, as far as is known now; None: unknown, then ``--max_steps`` is required."""

    def __iter__(self) -> Iterator[list[Trajectory]]: ...

    def publish(self, version: int) -> None:
        """Take note that the policy has new weights, those after ``version`` global steps."""

    def evaluate(self) -> list[Trajectory]:
        """Scored responses to held-out tasks, grouped by task; empty on all ranks without such tasks."""

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` resumes from, as JSON, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state: of an earlier session, or of the step before one that was dropped."""

    def close(self) -> None:
        """Release what the source holds."""
