"""Trajectories to tensors, and the buffer of a rollout: normalized over all ranks, dealt out in optimizer steps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo.config import TrainPPOConfig
from openppo.models.padding import MicroBatchSize, micro_batches, pad_right, split_overhead
from openppo.tracking.metrics import Moments
from openppo.types import Comm, Experience, FinishReason, SingleProcess, Trajectory

_EPS = 1e-8
PER_ROW_FIELDS = ("scores", "truncated", "weight")
"""Fields of shape (B,); all others are (B, L)."""


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> Experience:
    """Right-padded tensors of the trajectories' tokens; masks come from lengths, never from token ids."""
    sequences, attention_mask = pad_right([t.token_ids for t in trajectories], pad_token_id)
    action_mask, _ = pad_right([t.action_mask for t in trajectories], 0)
    log_probs = torch.zeros(sequences.shape)
    for row, trajectory in enumerate(trajectories):
        log_probs[row, : len(trajectory.log_probs)] = torch.tensor(trajectory.log_probs)
    return Experience(
        sequences=sequences,
        attention_mask=attention_mask,
        action_mask=action_mask.bool(),
        rollout_log_probs=torch.where(action_mask.bool(), log_probs, 0.0),
        truncated=torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories]),
        weight=torch.tensor([t.weight for t in trajectories]),
    )


def split_rows(experience: Experience) -> Iterator[Experience]:
    """One experience per row, its padding cut off; copies, so that no row keeps the whole batch in memory."""
    lengths = experience.attention_mask.sum(-1).tolist()
    tensors = experience.tensors()
    for row, length in enumerate(lengths):
        yield Experience(
            **{
                name: (tensor[row : row + 1] if name in PER_ROW_FIELDS else tensor[row : row + 1, :length]).clone()
                for name, tensor in tensors.items()
            }
        )


def join_rows(rows: Sequence[Experience]) -> Experience:
    """Rows (or batches) padded on the right to the longest; padding is 0 and False everywhere, ids included."""
    width = max(row.sequences.shape[1] for row in rows)

    def joined(name: str, tensors: list[Tensor]) -> Tensor:
        if name in PER_ROW_FIELDS:
            return torch.cat(tensors)
        return torch.cat([F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])

    names = rows[0].tensors()
    return Experience(**{name: joined(name, [row.tensors()[name] for row in rows]) for name in names})


def idle_experience(like: Experience | None = None) -> Experience:
    """One row of two tokens without any action, for a rank that has less to do than others."""
    shape, device = (1, 2), torch.device("cpu") if like is None else like.sequences.device
    shapes = {field.name: shape[:1] if field.name in PER_ROW_FIELDS else shape for field in fields(Experience)}
    made = {name: torch.zeros(of_field, device=device) for name, of_field in shapes.items()}
    made["sequences"] = made["sequences"].long()
    made["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=device)
    made |= {name: made[name].bool() for name in ("action_mask", "truncated")}
    return Experience(**made)


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer step.

    ``micro_batches`` has the same length on all ranks; where a rank has no samples left it holds one row without
    any action. ``n_tokens`` counts the action tokens of the whole step and ``n_sequences`` its samples with any
    action, over all micro-batches and ranks, each times its sample's weight. ``places`` are those of each micro-batch's
    samples among the samples of all ranks.
    """

    micro_batches: list[Experience]
    n_tokens: float
    n_sequences: float
    places: list[list[int]] = field(default_factory=list)


class ReplayBuffer:
    """Experiences of single samples.

    Each rank fills its own; ``mini_batches`` puts all ranks' samples together, so that which samples share an
    optimizer step does not depend on how many ranks made them. ``limit`` is the largest number of samples of one
    rank (0: none): the oldest are dropped first. With ``normalize`` a buffer that is filled has normalized advantages.
    """

    def __init__(
        self,
        comm: Comm | None = None,
        limit: int = 0,
        cpu_offload: bool = True,
        zero_stage: int = 0,
        normalize: bool = False,
    ) -> None:
        self.comm = comm or SingleProcess()
        self.limit = limit
        self.cpu_offload = cpu_offload
        self.split_overhead = split_overhead(zero_stage)
        self.normalizes = normalize
        self.items: list[Experience] = []

    def __len__(self) -> int:
        return len(self.items)

    def append(self, experience: Experience) -> None:
        """Add every row of a batch."""
        for row in split_rows(experience):
            self.items.append(row.to("cpu") if self.cpu_offload else row)
        if self.limit > 0:
            self.items = self.items[-self.limit :]

    def extend(self, experiences: Iterable[Experience]) -> None:
        """Add every row of several batches."""
        for experience in experiences:
            self.append(experience)

    def fill(self, experiences: Iterable[Experience]) -> None:
        """Replace the samples by those of a new rollout. All ranks call this together."""
        self.clear()
        self.extend(experiences)
        if self.normalizes:
            self.normalize("advantages")

    def clear(self) -> None:
        """Drop all samples."""
        self.items = []

    def normalize(self, name: str) -> None:
        """(x - mean) / sqrt(var + 1e-8) over the action tokens of all ranks, for the field ``name``; 0 elsewhere.

        Mean and (biased) variance are taken in float64. All ranks call this together.
        """
        kept = [item.tensors()[name][item.action_mask].double().cpu() for item in self.items]
        moments = Moments.of(torch.cat([torch.zeros(0, dtype=torch.float64), *kept]), self.comm)
        scale = math.sqrt(moments.variance + _EPS)

        def normalized(tensor: Tensor, mask: Tensor) -> Tensor:
            return torch.where(mask, ((tensor.double() - moments.mean) / scale).to(tensor.dtype), 0.0)

        self.items = [
            item.with_fields(**{name: normalized(item.tensors()[name], item.action_mask)}) for item in self.items
        ]

    def mini_batches(
        self,
        batch_size: int,
        micro_batch_size: int,
        epochs: int,
        seed: int,
        micro_tokens: int | None = None,
    ) -> Iterator[MiniBatch]:
        """All ranks' samples, shuffled anew for each epoch from ``seed``, ``batch_size`` of them per optimizer step.

        The last step of an epoch takes what is left. Micro-batches have ``micro_batch_size`` samples, or with
        ``micro_tokens`` as many as fit into that number of tokens with padding. All ranks call this together, with the
        same arguments.
        """
        items = self._everyones()
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(items), generator=generator).tolist() for _ in range(epochs))
        steps = (order[i : i + batch_size] for order in orders for i in range(0, len(order), batch_size))
        for step in steps:
            yield self._share({i: items[i] for i in step}, micro_batch_size, micro_tokens)

    def _share(self, step: dict[int, Experience], size: int, tokens: int | None) -> MiniBatch:
        """This rank's micro-batches of a step, whose samples come with their places.

        Ranks' shares differ by one sample at most, and little in tokens.
        """
        world, lengths = self.comm.world_size, {place: item.sequences.shape[1] for place, item in step.items()}
        ordered = sorted(step, key=lambda place: lengths[place], reverse=True)
        rounds = [ordered[start : start + world] for start in range(0, len(ordered), world)]
        shares: list[list[int]] = [[] for _ in range(world)]
        for i, dealt in enumerate(rounds):  # to and fro, so that shares differ little
            for rank, place in enumerate(dealt):
                shares[rank if i % 2 == 0 else world - 1 - rank].append(place)
        limit = MicroBatchSize(size, tokens, self.split_overhead)
        plans = [micro_batches([lengths[place] for place in share], limit) for share in shares]
        mine = [[shares[self.comm.rank][i] for i in rows] for rows in plans[self.comm.rank]]
        joined = [join_rows([step[place] for place in places]) for places in mine]
        n_idle = max(map(len, plans)) - len(joined)
        joined += [idle_experience(like=step[ordered[0]]) for _ in range(n_idle)]
        weights = [1.0 if item.weight is None else float(item.weight) for item in step.values()]
        actions = [int(item.action_mask.sum()) for item in step.values()]
        n_tokens = sum(weight * n for weight, n in zip(weights, actions, strict=True))
        n_sequences = sum(weight for weight, n in zip(weights, actions, strict=True) if n > 0)
        return MiniBatch(joined, n_tokens, n_sequences, places=mine + [[]] * n_idle)

    def _everyones(self) -> list[Experience]:
        """All ranks' samples in rank order."""
        if self.comm.world_size == 1:
            return self.items
        packed = self.comm.all_gather_object(_pack(self.items))
        device = self.items[0].sequences.device if self.items else torch.device("cpu")
        return [Experience(**row).to(device) for rank in packed for row in _unpack(rank)]


def mini_batches(buffer: ReplayBuffer, config: TrainPPOConfig, n_done: int) -> Iterator[MiniBatch]:
    """The optimizer steps of the global step after ``n_done`` of them, with their samples."""
    batch, seed = config.batch, config.deepspeed.seed + n_done
    sizes = batch.train_batch_size, batch.micro_train_batch_size, batch.max_epochs
    return buffer.mini_batches(*sizes, seed, config.ppo.micro_train_tokens)


def _pack(items: list[Experience]) -> tuple[list[int], dict[str, Tensor]]:
    """Lengths and one flat CPU tensor per field: far fewer objects to send than one per sample and field."""
    lengths, tensors = [item.sequences.shape[1] for item in items], [item.tensors() for item in items]
    names = tensors[0] if items else ()
    return lengths, {name: torch.cat([of_item[name].flatten() for of_item in tensors]).cpu() for name in names}


def _unpack(packed: tuple[list[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The fields of each sample."""
    lengths, flat = packed
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in flat.items():
        if name in PER_ROW_FIELDS:
            parts[name] = list(tensor.split(1))  # (1,) each
        else:
            parts[name] = [piece[None] for piece in tensor.split(lengths)]  # (1, L) each
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(len(lengths))]
