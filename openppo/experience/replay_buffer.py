"""Trajectories to tensors, and the buffer of a rollout: normalized over all ranks, dealt out in optimizer steps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.media import Media, distinct_ids
from openppo.models.batching import MicroBatchSize, micro_batches, split_overhead
from openppo.models.dealing import deal
from openppo.models.padding import pad_right
from openppo.models.prefix_batches import shared_plan
from openppo.tracking.metrics import Moments
from openppo.types import Comm, Experience, SingleProcess, Trajectory

PER_ROW_FIELDS = ("scores", "truncated", "weight", "share")
"""Fields of shape (B,); all others are (B, L)."""


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> Experience:
    """Right-padded tensors of the trajectories' tokens; masks come from lengths, never from token ids."""
    sequences, attention_mask = pad_right([t.token_ids for t in trajectories], pad_token_id)
    action_mask, _ = pad_right([t.loss_mask for t in trajectories], 0)
    log_probs = pad_sequence([torch.tensor(t.log_probs) for t in trajectories], batch_first=True)
    return Experience(
        sequences=sequences,
        attention_mask=attention_mask,
        action_mask=action_mask.bool(),
        rollout_log_probs=torch.where(action_mask.bool(), log_probs, 0.0),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        weight=torch.tensor([t.weight for t in trajectories]),
        share=torch.tensor([t.share for t in trajectories]),
        media=joined_media(trajectories),
    )


def joined_media(trajectories: Sequence[Trajectory]) -> tuple[Media, ...]:
    """Images of each; empty if none has any."""
    media = tuple(t.prompt.media for t in trajectories)
    return media if any(media) else ()


def split_rows(experience: Experience) -> Iterator[Experience]:
    """One experience per row, its padding cut off; copies, so that no row keeps the whole batch in memory."""
    for row, length in enumerate(experience.attention_mask.sum(-1).tolist()):
        parts = {name: tensor[row : row + 1] for name, tensor in experience.tensors().items()}
        cut = {
            name: part if name in PER_ROW_FIELDS else part[:, :length]
            for name, part in parts.items()
        }
        yield Experience(
            **{name: part.clone() for name, part in cut.items()},
            media=experience.media[row : row + 1],
        )


def join_rows(rows: Sequence[Experience]) -> Experience:
    """Rows (or batches) padded on the right to the longest; padding is 0 and False everywhere, ids included."""
    width = max(row.sequences.shape[1] for row in rows)
    joined: dict[str, Any] = {}
    for name in rows[0].tensors():
        parts = [row.tensors()[name] for row in rows]
        joined[name] = torch.cat(
            [p if name in PER_ROW_FIELDS else F.pad(p, (0, width - p.shape[1])) for p in parts]
        )
    media = tuple(m for row in rows for m in (row.media or ((),) * len(row)))
    return Experience(**joined, media=media if any(media) else ())


def idle_experience() -> Experience:
    """One row of two tokens without any action, for a rank that has less to do than others."""
    dtypes = {"sequences": torch.int64} | dict.fromkeys(
        ("attention_mask", "action_mask", "truncated"), torch.bool
    )
    names = [field.name for field in fields(Experience) if field.name != "media"]
    sizes = {name: (1,) if name in PER_ROW_FIELDS else (1, 2) for name in names}
    made: dict[str, Any] = {
        name: torch.zeros(size, dtype=dtypes.get(name)) for name, size in sizes.items()
    }
    made["attention_mask"] = ~made["attention_mask"]
    return Experience(**made)


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of an optimizer step.

    ``micro_batches`` are equally many on all ranks, idle ones of one row without any action. ``n_tokens`` counts the
    action tokens of the whole step, ``n_sequences`` its samples with any action (of a part of one its share), over all
    ranks, each times its sample's weight. ``places`` are those of each micro-batch's samples among all ranks' samples.
    """

    micro_batches: list[Experience]
    n_tokens: float
    n_sequences: float
    places: list[list[int]] = field(default_factory=list)


@dataclass(eq=False)
class ReplayBuffer:
    """Experiences of single samples, those of one rank.

    Which samples share an optimizer step does not depend on how many ranks made them. ``limit`` is the largest number
    of samples of one rank (0: none): the oldest are dropped first. With ``normalizes``, ``fill`` normalizes advantages.
    With ``shares_prompts`` samples that begin alike are in a micro-batch where that pays.
    """

    comm: Comm = field(default_factory=SingleProcess)
    limit: int = 0
    cpu_offload: bool = True
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
        self.items += split_rows(
            experience.to("cpu") if self.cpu_offload else experience
        )  # one copy for each field
        self.items = self.items[-self.limit :]  # all of them if it is 0

    def fill(self, experiences: Iterable[Experience]) -> None:
        """Replace the samples by those of a new rollout. All ranks call this together."""
        self.clear()
        for experience in experiences:
            self.append(experience)
        if self.normalizes:
            self.normalize("advantages")

    def clear(self) -> None:
        """Drop all samples."""
        self.items = []

    def normalize(self, name: str) -> None:
        """(x - mean) / sqrt(var + 1e-8) over the action tokens of all ranks, for a field; in float64. Collective."""
        kept = [item.tensors()[name][item.action_mask].double().cpu() for item in self.items]
        moments = Moments.of(torch.cat([torch.zeros(0, dtype=torch.float64), *kept]), self.comm)
        scale = math.sqrt(moments.variance + 1e-8)
        for i, item in enumerate(self.items):
            tensor = item.tensors()[name]
            normalized = ((tensor.double() - moments.mean) / scale).to(tensor.dtype)
            self.items[i] = item.with_fields(
                **{name: torch.where(item.action_mask, normalized, 0.0)}
            )

    def mini_batches(
        self,
        batch_size: int,
        micro_batch_size: int,
        epochs: int,
        seed: int,
        micro_tokens: int | None = None,
    ) -> Iterator[MiniBatch]:
        """All ranks' samples, shuffled anew for each epoch from ``seed``, ``batch_size`` of them per optimizer step.

        The last step of an epoch takes what is left. Micro-batches have ``micro_batch_size`` samples, or as many as fit
        into ``micro_tokens`` with padding. Collective, with the same arguments.
        """
        items = self.items
        if self.comm.world_size > 1:
            joined = join_rows(items).to("cpu") if items else None  # few objects to send
            device = items[0].sequences.device if items else torch.device("cpu")
            gathered = self.comm.all_gather_object(joined)
            items = [
                row.to(device)
                for of_rank in gathered
                if of_rank is not None
                for row in split_rows(of_rank)
            ]
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(items), generator=generator).tolist() for _ in range(epochs))
        steps = (
            order[i : i + batch_size] for order in orders for i in range(0, len(order), batch_size)
        )
        for step in steps:
            yield self._share({i: items[i] for i in step}, micro_batch_size, micro_tokens)

    def _share(self, step: dict[int, Experience], size: int, tokens: int | None) -> MiniBatch:
        """This rank's micro-batches of a step, whose samples come with their places among all ranks'."""
        places, lengths = list(step), [item.sequences.shape[1] for item in step.values()]
        n_ranks, limit = (
            self.comm.world_size,
            MicroBatchSize(size, tokens, split_overhead(self.zero_stage)),
        )
        plans = None
        if self.shares_prompts:
            rows = [distinct_ids(item.sequences[0].tolist(), *item.media) for item in step.values()]
            plans = shared_plan(rows, n_ranks, limit)
        if plans is None:
            shares = deal(lengths, n_ranks)
            plans = [
                [[share[i] for i in b] for b in micro_batches([lengths[i] for i in share], limit)]
                for share in shares
            ]
        mine = [[places[i] for i in rows] for rows in plans[self.comm.rank]]
        joined = [join_rows([step[place] for place in of_micro]) for of_micro in mine]
        n_idle = max(map(len, plans)) - len(joined)
        joined += [idle_experience().to(step[places[0]].sequences.device) for _ in range(n_idle)]
        counts = [(_one(x.weight), _one(x.share), int(x.action_mask.sum())) for x in step.values()]
        n_tokens = sum(weight * n for weight, _, n in counts)
        n_sequences = sum(weight * share for weight, share, n in counts if n > 0)
        return MiniBatch(joined, n_tokens, n_sequences, places=mine + [[]] * n_idle)


def _one(of_row: Tensor | None) -> float:
    return 1.0 if of_row is None else float(of_row)


def mini_batches(buffer: ReplayBuffer, config: TrainPPOConfig, n_done: int) -> Iterator[MiniBatch]:
    """The optimizer steps of the global step after ``n_done`` of them, with their samples."""
    batch, seed = config.batch, config.deepspeed.seed + n_done
    sizes = batch.train_batch_size, batch.micro_rows, batch.max_epochs
    return buffer.mini_batches(*sizes, seed, config.ppo.micro_train_tokens)
