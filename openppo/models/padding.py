"""Token ids to padded tensors, padded tensors to packed rows where that is exact, and batches with little padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo import logger
from openppo.models.attention import BY_LENGTHS, finished_mask
from openppo.models.pretrained import context_length
from openppo.types import Comm

_ROW = [2, 0, 1, 3, 3]  # what tiny forwards look at, beside others
_LEAK, _NOISE = 1e-5, 0.05  # bounds of its changes by others, and by its place, in bfloat16 too
_WORTH_DEALING = 1.2
"""Tokens of the fullest rank before over those after: below, small models may win less than sending rows costs.

That took 0.4 to 0.6 us for each token of all ranks, measured between processes on two busy CPU cores.
"""


@dataclass(frozen=True)
class MicroBatchSize:
    """Limit of one forward: ``rows``, or as many as fit into ``tokens``, padding included.

    ``overhead`` of an extra micro-batch is a fraction of a full one: a batch is split if that much padding is saved.
    """

    rows: int
    tokens: int | None = None
    overhead: float = 1 / 8

    def rows_of(self, length: int) -> int:
        """Rows of ``length`` tokens in one forward; at least one."""
        return self.rows if self.tokens is None else max(1, self.tokens // max(1, length))


def split_overhead(zero_stage: int) -> float:
    """Overhead of an extra micro-batch. Under ZeRO-3 each pass gathers all weights, so none is split off."""
    return 1.0 if zero_stage == 3 else MicroBatchSize.overhead


def micro_batches(lengths: Sequence[int], size: MicroBatchSize) -> list[list[int]]:
    """Indices of sequences in batches of similar length, the longest first.

    Of all ways to cut the sorted sequences, the one with the least padding and overhead; what is too long is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    n, longest = len(order), max(lengths, default=0)
    overhead = size.overhead * (min(size.rows, n) * longest if size.tokens is None else size.tokens)
    least, ends = [0.0] * (n + 1), [n] * (n + 1)  # for sequences i to n: the cost, and where the first batch ends
    for first in reversed(range(n)):
        length = lengths[order[first]]
        candidates = range(first + 1, min(first + size.rows_of(length), n) + 1)
        ends[first] = min(reversed(candidates), key=lambda end: (end - first) * length + least[end])
        least[first] = (ends[first] - first) * length + least[ends[first]] + overhead
    batches, first = [], 0
    while first < n:
        batches.append(order[first : ends[first]])
        first = ends[first]
    return batches


def equal_batches(lengths: Sequence[int], size: MicroBatchSize, comm: Comm) -> list[list[int]]:
    """Indexes of rows in ``micro_batches``, the longest first; rows of length 0 are in none.

    As many batches as the rank with the most has, as partitioned weights demand: the last may be empty. Collective.
    """
    real = [i for i in range(len(lengths)) if lengths[i] > 0]
    batches = [[real[k] for k in batch] for batch in micro_batches([lengths[i] for i in real], size)]
    n_batches = int(comm.all_reduce(torch.tensor(len(batches)), "max"))
    return batches + [[] for _ in range(n_batches - len(batches))]


def deal(lengths: Sequence[int], n_shares: int) -> list[list[int]]:
    """Indexes of sequences in shares that differ by at most one sequence and by no more tokens than the longest has."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    rounds = [order[start : start + n_shares] for start in range(0, len(order), n_shares)]
    shares: list[list[int]] = [[] for _ in range(n_shares)]
    for i, dealt in enumerate(rounds):  # to and fro
        for share, index in zip(shares if i % 2 == 0 else reversed(shares), dealt, strict=False):
            share.append(index)
    return shares


class Deal:
    """Rows of all ranks, dealt over the ranks by tokens where that relieves the fullest one.

    ``lengths`` are those of this rank's rows. Rows are tensors (N, L), N the same for all. Collective.
    """

    def __init__(self, lengths: Sequence[int], comm: Comm) -> None:
        of_ranks = comm.all_gather_object(list(lengths))
        self.comm = comm
        self.lengths = [length for of_rank in of_ranks for length in of_rank]
        stops = accumulate(map(len, of_ranks))
        self.own = [[*range(stop - len(of_rank), stop)] for of_rank, stop in zip(of_ranks, stops, strict=True)]
        dealt = deal(self.lengths, comm.world_size)
        self.shares = dealt if self._most(self.own) > _WORTH_DEALING * self._most(dealt) else self.own

    def out(self, rows: list[Tensor]) -> list[Tensor]:
        """This rank's share, for its own ``rows``."""
        return self._moved(rows, self.own, self.shares)

    def back(self, rows: list[Tensor]) -> list[Tensor]:
        """This rank's own rows, for those of its share."""
        return self._moved(rows, self.shares, self.own)

    def _most(self, shares: list[list[int]]) -> int:
        return max(sum(self.lengths[place] for place in share) for share in shares)

    def _moved(self, rows: list[Tensor], held: list[list[int]], wanted: list[list[int]]) -> list[Tensor]:
        """The rows at the places ``wanted`` on this rank, where each rank has those that it has ``held``."""
        if held == wanted:
            return rows
        found: dict[int, Tensor] = {}
        gathered = self.comm.all_gather_object(torch.cat(rows, -1).cpu() if rows else None)
        for places, joined in zip(held, gathered, strict=True):
            if joined is not None:
                found.update(zip(places, joined.split([self.lengths[i] for i in places], -1), strict=True))
        return [found[place] for place in wanted[self.comm.rank]]


def pad_right(rows: Sequence[Sequence[int] | Tensor], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the mask of real tokens, bool (B, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    sequences = pad_sequence([torch.as_tensor(row, dtype=torch.int64) for row in rows], True, pad_token_id)
    return sequences, torch.arange(sequences.shape[1]) < lengths[:, None]


def rounded_width(length: int) -> int:
    """Next multiple of 8, or of a larger power of 2 for long rows; at most a sixteenth, or 7, above ``length``."""
    step = max(8, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def pad_width(sequences: Tensor, model: Any) -> Tensor:
    """``sequences`` int64 (B, L) on the model's device; on CPUs in bfloat16 (B, ``rounded_width(L)``), if that fits it.

    oneDNN compiles matrix products for each new shape, keeps a thousand of them, and is faster with even ones.
    """
    length, device = sequences.shape[1], device_of(model)
    if device.type != "cpu" or model.dtype is not torch.bfloat16:
        return on_device(sequences, device)
    positions, width = context_length(model.config), rounded_width(length)
    return sequences if positions is not None and width > positions else F.pad(sequences, (0, width - length))


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``; to a GPU from pinned memory, as the host would wait for the GPU's work else."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def device_of(model: Any) -> torch.device:
    """Where the weights of ``model`` are."""
    return next(model.parameters()).device


def pack_rows(
    sequences: Tensor, attention_mask: Tensor, model: Any, position_ids: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Real tokens of a batch in one row of T: inputs on ``model``'s device, and where in the row each token is.

    ``sequences`` int64 (B, L) padded on the right, ``attention_mask`` bool (B, L); ``position_ids`` int64 (B, L), if
    rows hold several documents. Inputs int64 (1, T), with positions from 0 in each document, and int32 where each
    begins, once for all layers; places int64 (B x L,), of padding that of the last real token before it.
    """
    real, length = attention_mask.bool().flatten(), sequences.shape[1]  # (B x L,)
    if position_ids is None:
        position_ids = torch.arange(length, device=sequences.device).expand_as(sequences)
    positions = position_ids.flatten()[real]  # (T,)
    starts = F.pad((positions == 0).nonzero()[:, 0], (0, 1), value=len(positions)).int()
    inputs: dict[str, Any] = {"input_ids": sequences.flatten()[real][None], "position_ids": positions[None]}
    inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}
    if model.config._attn_implementation == BY_LENGTHS:
        inputs["attention_mask"] = finished_mask(sequences.device)
    device = device_of(model)
    inputs = {name: on_device(value, device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return inputs, (real.cumsum(0) - 1).clamp(min=0)


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether ``model`` keeps documents of one row apart, by tiny forwards; logs why not.

    ``model`` is called like ``Actor.forward``, by all ranks together. transformers separates documents where position
    ids restart, but not for every architecture and attention.
    """

    def after(first: list[int]) -> Tensor:
        ids = torch.tensor([[*first, *_ROW]], device=device)
        positions = torch.tensor([[*range(len(first)), *range(len(_ROW))]], device=device)
        return model(ids, torch.ones_like(ids, dtype=torch.bool), position_ids=positions)[0, len(first) + 1 :]

    return _is_exact("documents are not packed", after)


@torch.no_grad()
def pack_where_exact(module: Any, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str) -> None:
    """Have ``module`` put a batch's samples into one unpadded row if they stay apart there, by tiny forwards.

    ``forward`` is the module or the engine around it, called by all ranks together. That is for attention by lengths,
    which computes no padding then; on a GPU without it a line says so.
    """
    attention = module.model.config._attn_implementation
    if attention not in (BY_LENGTHS, "flash_attention_2"):
        if device.type == "cuda":
            said = (
                "samples of the %s are padded: its attention is %s. That by lengths needs bfloat16, compute capability "
            )
            said += "8.0, torch 2.13 (this is %s), and a model that supports FlashAttention."
            logger.info(said, name, attention, torch.__version__)
        return

    def beside(first: list[int]) -> Tensor:
        module.packs_rows = len(first) > 0
        sequences, mask = pad_right([first or [0], _ROW], 0)
        return forward(sequences.to(device), mask.to(device))[1]

    module.packs_rows = _is_exact(f"samples of the {name} are padded", beside)


def _is_exact(otherwise: str, beside: Callable[[list[int]], Tensor]) -> bool:
    """Whether the outputs of ``_ROW`` are the same ``beside`` two others, and without others up to rounding."""
    try:
        alone, one, another = beside([]), beside([0, 1, 2]), beside([3, 1, 0])
    except (TypeError, ValueError) as error:
        logger.warning("%s: the model cannot read one row of them (%s)", otherwise, error)
        return False
    leak, shift = float((one - another).abs().max()), float((one - alone).abs().max() / alone.abs().max().clamp(min=1))
    if leak <= _LEAK and shift <= _NOISE:
        return True
    said = "%s: in one row they change each other's outputs by %.2g, and their own by their place by %.2g"
    logger.warning(said, otherwise, leak, shift)
    return False
