"""Types that all of OpenPPO shares.

Shape legend, used in all comments: B sequences, L padded tokens, V vocabulary, G samples per prompt.
Every per-token tensor is ``(B, L)`` and token-aligned: entry t is about token t. Sequences are padded on the right;
masks are never inferred by comparing ids with PAD or EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from openppo.endings import Ending as Ending
from openppo.endings import FinishReason as FinishReason
from openppo.media import TokenIds as TokenIds
from openppo.model_inputs import ModelInputs as ModelInputs
from openppo.sample import Completion as Completion
from openppo.sample import Episode as Episode
from openppo.sample import EpisodeInput as EpisodeInput
from openppo.sample import Prompt as Prompt
from openppo.sample import Sample as Sample
from openppo.sample import Score as Score
from openppo.sample import Segment as Segment
from openppo.sample import segments_of as segments_of
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
class Experience:
    """A batch of segments as tensors. Each stage returns a new object with more fields; none mutates.

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
    """Source of a trainer's samples. All ranks call every method together.

    Each iteration yields this rank's scored samples for one global step, in whole groups. In a ``Rollout`` the scores
    may still be pending: a source that wraps another one must first call ``wait_for_scores`` on all ranks, because a
    signal may reach only one of them.

    >>> class Recorded(RolloutSource):
    ...     steps = 1
    ...
    ...     def __iter__(self):
    ...         yield samples  # of one global step, sampled earlier
    >>> [len(rollout) for rollout in Recorded()]
    [2]
    """

    @property
    def steps(self) -> int | None:
        """Global steps of the whole run by the current plan; None if unknown, which requires ``--max_steps``."""

    def __iter__(self) -> Iterator[Sequence[Sample]]: ...

    def publish(self, version: int) -> None:
        """Announce the policy's new weights, those after ``version`` global steps."""

    def evaluate(self) -> Sequence[Sample]:
        """Return scored samples of held-out prompts, grouped by prompt; empty on all ranks if there are none."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict``, as JSON, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier session, or of the step before a dropped one."""

    def close(self) -> None:
        """Release the resources of the source."""
