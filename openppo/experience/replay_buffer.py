"""Buffer of a rollout: tensors of segments, normalized over all ranks, dealt out in optimizer steps."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.model_inputs import ModelInputs
from openppo.models.batching import MicroBatchSize, micro_batches, split_overhead
from openppo.models.dealing import deal
from openppo.models.prefix_batches import shared_plan
from openppo.tracking.metrics import Moments
from openppo.types import Comm, Experience, Sample, SingleProcess, segments_of

T = TypeVar("T")

PER_ROW_FIELDS = ("scores", "truncated", "weight", "fraction")
"""Fields of shape (B,); all others are (B, L)."""


def collate(samples: Sequence[Sample], pad_token_id: int) -> Experience:
    """Make a row of each segment, padded on the right; masks come from lengths, never from token ids."""
    truncated: list[bool] = []
    weights: list[float] = []
    fractions: list[float] = []
    for sample in samples:
        truncated += [sample.truncates(segment) for segment in sample.segments]
        weights += [sample.weight for _ in sample.segments]
        fractions += sample.fractions

    segments = segments_of(samples)
    masks = [torch.tensor(segment.loss_mask) for segment in segments]
    action_mask = pad_sequence(masks, batch_first=True)
    log_probs = [torch.tensor(segment.log_probs) for segment in segments]
    return Experience(
        ModelInputs.of(segments, pad_token_id),
        action_mask=action_mask,
        rollout_log_probs=torch.where(action_mask, pad_sequence(log_probs, batch_first=True), 0.0),
        truncated=torch.tensor(truncated),
        weight=torch.tensor(weights),
        fraction=torch.tensor(fractions),
    )


def split_rows(experience: Experience) -> Iterator[Experience]:
    """Split into one experience per row, without padding.

    Tensors are copies, so that no row keeps the whole batch in memory.
    """
    for row, inputs in enumerate(experience.inputs.rows()):
        length = inputs.sequences.shape[1]
        tensors: dict[str, Any] = {}
        for name, tensor in experience.tensors().items():
            tensor = tensor[row : row + 1]
            if name not in PER_ROW_FIELDS:
                tensor = tensor[:, :length]
            tensors[name] = tensor.clone()
        yield Experience(inputs, **tensors)


def join_rows(rows: Sequence[Experience]) -> Experience:
    """Join rows (or batches), padded on the right to the longest; padding is 0 or False, for ids too."""
    inputs = ModelInputs.join([row.inputs for row in rows])
    width = inputs.sequences.shape[1]
    joined: dict[str, Any] = {}
    for name in rows[0].tensors():
        tensors = [row.tensors()[name] for row in rows]
        if name not in PER_ROW_FIELDS:
            tensors = [F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
        joined[name] = torch.cat(tensors)
    return Experience(inputs, **joined)


def idle_experience() -> Experience:
    """One row of two tokens without actions, for a rank that has less to do than others."""
    masks = ("action_mask", "truncated")
    tensors: dict[str, Any] = {}
    for name in (each.name for each in fields(Experience) if each.name != "inputs"):
        size = (1,) if name in PER_ROW_FIELDS else (1, 2)
        tensors[name] = torch.zeros(size, dtype=torch.bool if name in masks else None)
    return Experience(ModelInputs.of_ids([[0, 0]], pad_token_id=0), **tensors)


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer step.

    All ranks have the same number of ``micro_batches``; an idle one has one row without actions. ``n_tokens`` counts
    the action tokens of the whole step over all ranks, ``n_sequences`` its rows with any action by their fraction of a
    sample, each times its sample's weight. ``places`` locate the rows of each micro-batch among all ranks' rows.
    """

    micro_batches: list[Experience]
    n_tokens: float
    n_sequences: float
    places: list[list[int]] = field(default_factory=list)


@dataclass(eq=False)
class ReplayBuffer:
    """Buffer of one rank's rows, an experience (1, L) of each segment.

    Rows are kept in CPU memory. Those of an optimizer step do not depend on the number of ranks that made them. With
    ``normalizes``, ``fill`` normalizes advantages. With ``shares_prompts``, rows with a common prefix share a
    micro-batch where that pays.

    >>> from openppo.tracking.metrics import Metrics
    >>> buffer = ReplayBuffer()
    >>> buffer.fill(maker.make(samples, Metrics()))
    >>> len(buffer)
    2
    >>> steps = buffer.mini_batches(batch_size=1, micro_batch_size=1, epochs=1, seed=0)
    >>> [step.n_tokens for step in steps]  # action tokens of each optimizer step
    [2.0, 2.0]
    """

    comm: Comm = field(default_factory=SingleProcess)
    zero_stage: int = 0
    normalizes: bool = False
    shares_prompts: bool = False
    items: list[Experience] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.comm, int):
            raise TypeError(
                f"comm is {self.comm}, no process group: give batch sizes to ReplayBuffer.mini_batches."
            )

    def __len__(self) -> int:
        return len(self.items)

    def append(self, experience: Experience) -> None:
        """Add every row of a batch."""
        self.items += split_rows(experience.to("cpu"))  # one copy for each field

    def fill(self, experiences: Iterable[Experience]) -> None:
        """Replace the rows by those of a new rollout. Collective."""
        self.clear()
        for experience in experiences:
            self.append(experience)
        if self.normalizes:
            self.normalize("advantages")

    def clear(self) -> None:
        """Drop all rows."""
        self.items = []

    def normalize(self, name: str) -> None:
        """Normalize a field over the action tokens of all ranks, in float64. Collective.

        (x - mean) / sqrt(var + 1e-8). Nothing happens if the rows do not have the field yet.
        """
        has_field = all(name in item.tensors() for item in self.items)
        items = self.items if has_field else []
        values = [torch.zeros(0, dtype=torch.float64)]
        for item in items:
            actions = item.tensors()[name][item.action_mask]
            values.append(actions.double().cpu())
        moments = Moments.of(torch.cat(values), self.comm)

        scale = math.sqrt(moments.variance + 1e-8)
        for i, item in enumerate(items):
            tensor = item.tensors()[name]
            normalized = ((tensor.double() - moments.mean) / scale).to(tensor.dtype)
            normalized = torch.where(item.action_mask, normalized, 0.0)
            self.items[i] = item.with_fields(**{name: normalized})

    def own_entries(self, by_place: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the entry of each row of this rank; ``by_place`` are those that this rank has. Collective.

        A place is a row's number among all ranks' rows, as in ``MiniBatch.places``.
        """
        everywhere: dict[int, Tensor] = {}
        counts = []
        for n_rows, entries in self.comm.all_gather_object((len(self), dict(by_place))):
            counts.append(n_rows)
            everywhere |= entries

        first = sum(counts[: self.comm.rank])
        return [everywhere[first + row] for row in range(len(self))]

    def mini_batches(
        self,
        batch_size: int,
        micro_batch_size: int,
        epochs: int,
        seed: int,
        micro_tokens: int | None = None,
    ) -> Iterator[MiniBatch]:
        """Cut all ranks' rows into optimizer steps of ``batch_size``, shuffled for each epoch from ``seed``.

        The last step of an epoch has the remaining rows. Micro-batches have ``micro_batch_size`` rows, or as many
        as fit into ``micro_tokens`` with padding. Collective, with the same arguments.
        """
        items = self._gather_items()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(items), generator=generator).tolist()
            for start in range(0, len(order), batch_size):
                step = {place: items[place] for place in order[start : start + batch_size]}
                yield self._share(step, micro_batch_size, micro_tokens)

    def _gather_items(self) -> list[Experience]:
        """The rows of all ranks."""
        if self.comm.world_size == 1:
            return self.items

        joined = join_rows(self.items) if self.items else None  # few objects to send
        items: list[Experience] = []
        for batch in self.comm.all_gather_object(joined):
            if batch is not None:
                items += split_rows(batch)
        return items

    def _share(self, step: dict[int, Experience], size: int, tokens: int | None) -> MiniBatch:
        """This rank's micro-batches of a ``step``, which maps places among all ranks' samples to samples."""
        samples = list(step.values())
        limit = MicroBatchSize(size, tokens, split_overhead(self.zero_stage))
        plans = self._plan(samples, limit)
        plan = plans[self.comm.rank]
        places = [_select(list(step), rows) for rows in plan]
        joined = [join_rows(_select(samples, rows)) for rows in plan]

        n_idle = max(map(len, plans)) - len(plan)
        for _ in range(n_idle):
            places.append([])
            joined.append(idle_experience())

        weights = [_number(sample.weight) for sample in samples]
        fractions = [_number(sample.fraction) for sample in samples]
        n_actions = [int(sample.action_mask.sum()) for sample in samples]
        counts = list(zip(weights, fractions, n_actions, strict=True))
        return MiniBatch(
            joined,
            n_tokens=sum(weight * n for weight, _, n in counts),
            n_sequences=sum(weight * fraction for weight, fraction, n in counts if n > 0),
            places=places,
        )

    def _plan(self, samples: Sequence[Experience], limit: MicroBatchSize) -> list[list[list[int]]]:
        """Indexes of samples in the micro-batches of each rank."""
        n_ranks = self.comm.world_size
        if self.shares_prompts:
            ids = [sample.inputs.distinct_rows[0] for sample in samples]
            shared = shared_plan(ids, n_ranks, limit)
            if shared is not None:
                return shared

        lengths = [sample.sequences.shape[1] for sample in samples]
        plans = []
        for share in deal(lengths, n_ranks):
            batches = micro_batches(_select(lengths, share), limit)
            plans.append([_select(share, batch) for batch in batches])
        return plans


def _select(values: Sequence[T], indexes: Sequence[int]) -> list[T]:
    """The values at some indexes, in their order."""
    return [values[i] for i in indexes]


def _number(field_of_row: Tensor | None) -> float:
    """Value of a field of one row; 1 where the field is not set."""
    return 1.0 if field_of_row is None else float(field_of_row)


def mini_batches(
    buffer: ReplayBuffer, config: TrainPPOConfig, n_done: int, resolved: Resolved | None = None
) -> Iterator[MiniBatch]:
    """Mini-batches of global step ``n_done + 1``; sizes are those of the options without ``resolved``."""
    batch = config.batch
    resolved = resolved or Resolved.of(config)
    return buffer.mini_batches(
        batch.train_batch_size,
        batch.micro_rows,
        batch.max_epochs,
        seed=config.deepspeed.seed + n_done,
        micro_tokens=resolved.micro_train_tokens,
    )
