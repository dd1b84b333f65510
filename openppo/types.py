"""Types that all of OpenPPO shares.

Shape legend, used in all comments: B sequences, L padded tokens, V vocabulary, G samples per prompt.
Every per-token tensor is ``(B, L)`` and token-aligned: entry t is about token t. Sequences are padded on the right;
masks are never inferred by comparing ids with PAD or EOS.
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
from openppo.media import TokenIds as TokenIds
from openppo.model_inputs import ModelInputs as ModelInputs
from openppo.stopping import Interrupted as Interrupted
from openppo.stopping import StopCheck as StopCheck


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a response; ``temperature`` 0 decodes greedily.

    A response ends with EOS, a token of ``stop_token_ids``, or the token that completes a text of ``stop``, and
    includes it. In its first ``min_new_tokens`` tokens, EOS and those ids are not sampled and ``stop`` is ignored.

    >>> SamplingParams(max_new_tokens=256, temperature=0.6, top_p=0.95, stop=("</answer>",)).stop
    ('</answer>',)
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
    """An agent's episode, shared by the trajectories cut from it.

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

    @property
    def failure(self) -> str:
        """Ending of a failed episode, and the reason."""
        return f"{self.ending.value}: {self.error or self.output or 'no message'}"


@dataclass
class Trajectory:
    """Tokens of one episode, or of one part of it, in lists of equal length.

    ``action_mask`` is True for tokens that the policy sampled, and False for those of prompts, tools and environments.
    ``log_probs`` belong to the distribution sampled from and ``versions`` to the policy that sampled; where the mask is
    False, they are 0.0 and -1.

    >>> trajectory = Trajectory(
    ...     token_ids=[5, 6, 9, 1],
    ...     action_mask=[False, False, True, True],
    ...     log_probs=[0.0, 0.0, -0.7, -0.1],
    ...     versions=[-1, -1, 3, 3],
    ...     finish_reason=FinishReason.STOP,
    ...     prompt=Prompt("ab", token_ids=[5, 6]),
    ...     group=0,
    ...     scores={"reward_fn": 1.0},
    ... )
    >>> trajectory.response_ids, trajectory.spans, trajectory.total_score({})
    ([9, 1], [(2, 4)], 1.0)
    """

    token_ids: list[int]
    action_mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt: Prompt
    # Number of the prompt, shared by all responses to it.
    group: int
    # Factor in the losses; nothing else uses it.
    weight: float = 1.0
    # Fraction of the episode's actions that are in this segment. Rewards and groups count an episode once,
    # sequence-level losses weight its segments by this fraction, and everything else counts each segment.
    fraction: float = 1.0
    # Rewards of the whole trajectory, by name.
    scores: dict[str, float] = field(default_factory=dict)
    # Reward of each token; None if tokens have none.
    token_rewards: list[float] | None = None
    # Tokens at which a step ends and gets its reward; None if each action is a step.
    step_ends: list[bool] | None = None
    # The greedy response to the same prompt; several trajectories if its episode was cut into segments.
    greedy: tuple[Trajectory, ...] = ()
    # The agent's episode; None for a single response.
    episode: Episode | None = None
    # Numbers from a reward function that are only logged.
    extras: dict[str, float] = field(default_factory=dict)
    # Texts from a reward function, for dumps and printed samples.
    notes: dict[str, str] = field(default_factory=dict)
    # Actions that the losses train on, stale ones excluded; None: all actions.
    trained_mask: list[bool] | None = None
    # Texts that end a response; the response includes the one that ended it.
    stop: tuple[str, ...] = ()
    # Error message of a failed reward function.
    reward_error: str | None = None

    def __post_init__(self) -> None:
        lists = (self.token_ids, self.action_mask, self.log_probs, self.versions)
        lengths = {len(entries) for entries in lists}
        assert len(lengths) == 1 and self.weight >= 0, (
            f"unequal lengths {lengths} or negative weight {self.weight}"
        )

    @property
    def logged(self) -> dict[str, float | str]:
        """Numbers and texts that reward functions returned beside rewards, by name."""
        return {**self.extras, **self.notes}

    @property
    def media(self) -> Media:
        """Images of the prompt, and of an agent's turns."""
        return self.prompt.media

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
    def truncated(self) -> bool:
        """True if ``--generate_max_len`` cut the response; an episode's limits on turns or tokens do not count."""
        at_limit = self.episode is not None and self.episode.ending.is_limit
        return self.finish_reason is FinishReason.LENGTH and not at_limit

    @property
    def action_ids(self) -> list[int]:
        """Token ids that the policy sampled, in all spans."""
        pairs = zip(self.token_ids, self.action_mask, strict=True)
        return [token_id for token_id, is_action in pairs if is_action]

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt, for people to read; includes what an environment wrote between turns."""
        return self.token_ids[len(self.prompt.token_ids) :]

    @property
    def step_rewards(self) -> list[float]:
        """Reward of each step in order, or of each action if no steps are known."""
        if self.token_rewards is None:
            return []

        ends = self.step_ends or self.action_mask
        tokens = zip(self.token_rewards, ends, self.action_mask, strict=True)
        return [reward for reward, is_end, is_action in tokens if is_end and is_action]

    def total_score(self, weights: Mapping[str, float]) -> float:
        """Sum the named scores, each times its weight (1 by default)."""
        return sum(score * weights.get(name, 1.0) for name, score in self.scores.items())

    def total_reward(self, weights: Mapping[str, float]) -> float:
        """Sum all rewards: the total score and the token rewards."""
        return self.total_score(weights) + sum(self.token_rewards or [])


@dataclass(frozen=True)
class Score:
    """Rewards of one trajectory from one source; only actions have rewards.

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


@dataclass(frozen=True)
class Experience:
    """A batch of trajectories as tensors. Each stage returns a new object with more fields; none mutates.

    Tensors of shape (B, L) are float32, if not marked otherwise, and 0 outside ``action_mask``.

    >>> mask = torch.tensor([[True, True, True]])
    >>> experience = Experience(
    ...     ModelInputs(torch.tensor([[5, 6, 9]]), mask),
    ...     action_mask=torch.tensor([[False, False, True]]),
    ...     rollout_log_probs=torch.tensor([[0.0, 0.0, -0.7]]),
    ...     truncated=torch.tensor([False]),
    ... )
    >>> experience.with_fields(values=torch.zeros(1, 3)).values.shape
    torch.Size([1, 3])
    """

    inputs: ModelInputs
    action_mask: Tensor  # (B, L) bool: sampled and trained on
    rollout_log_probs: Tensor  # (B, L)
    truncated: Tensor  # (B,) bool
    weight: Tensor | None = None  # (B,); None: 1
    fraction: Tensor | None = None  # (B,); None: 1
    scores: Tensor | None = None  # (B,): all rewards before shaping
    log_probs: Tensor | None = None  # (B, L)
    ref_log_probs: Tensor | None = None  # (B, L)
    entropy: Tensor | None = None  # (B, L)
    values: Tensor | None = None  # (B, L)
    rewards: Tensor | None = None  # (B, L)
    advantages: Tensor | None = None  # (B, L)
    returns: Tensor | None = None  # (B, L)
    staleness: Tensor | None = None  # (B, L), in versions; None: 0

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, ModelInputs):
            order = "inputs, action_mask, rollout_log_probs, truncated"
            kind = type(self.inputs).__name__
            raise TypeError(
                f"inputs is a {kind}, no ModelInputs. The order is {order}; pass them by name."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def sequences(self) -> Tensor:
        """Token ids (B, L) of the inputs, int64."""
        return self.inputs.sequences

    @property
    def attention_mask(self) -> Tensor:
        """Real tokens (B, L) of the inputs, bool."""
        return self.inputs.attention_mask

    @property
    def old_or_rollout_log_probs(self) -> Tensor:
        """``log_probs`` once the actor has computed them, until then the engine's."""
        return self.rollout_log_probs if self.log_probs is None else self.log_probs

    def with_fields(self, **tensors: Any) -> Experience:
        """Return a copy with these fields set."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str, move: Callable[..., Tensor] = Tensor.to) -> Experience:
        """Return a copy on ``device``, to which ``move`` transfers each tensor."""
        moved = {name: move(tensor, device) for name, tensor in self.tensors().items()}
        return self.with_fields(inputs=self.inputs.to(device, move), **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name, without those of ``inputs``."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}


class Comm(Protocol):
    """Operations of a process group that code below the strategy needs.

    >>> comm: Comm = SingleProcess()
    >>> comm.all_gather_object("rank 0's")
    ["rank 0's"]
    """

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the sum, max or min (``op``) of a tensor over all ranks, as a new tensor."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""


class SingleProcess:
    """``Comm`` of a program without a process group.

    >>> SingleProcess().all_reduce(torch.tensor(3.0))
    tensor(3.)
    """

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class RolloutSource(Protocol):
    """Source of a trainer's trajectories. All ranks call every method together.

    Each iteration yields this rank's scored trajectories for one global step, in whole groups. In a ``Rollout`` the
    scores may still be pending: a source that wraps another one must first call ``wait_for_scores`` on all ranks,
    because a signal may reach only one of them.

    >>> class Recorded(RolloutSource):
    ...     steps = 1
    ...
    ...     def __iter__(self):
    ...         yield trajectories  # of one global step, sampled earlier
    >>> [len(rollout) for rollout in Recorded()]
    [2]
    """

    @property
    def steps(self) -> int | None:
        """Global steps of the whole run by the current plan; None if unknown, which requires ``--max_steps``."""

    def __iter__(self) -> Iterator[list[Trajectory]]: ...

    def publish(self, version: int) -> None:
        """Announce the policy's new weights, those after ``version`` global steps."""

    def evaluate(self) -> list[Trajectory]:
        """Return scored responses to held-out tasks, grouped by task; empty on all ranks if there are none."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict``, as JSON, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier session, or of the step before a dropped one."""

    def close(self) -> None:
        """Release the resources of the source."""
