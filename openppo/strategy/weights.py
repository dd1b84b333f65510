"""The trained policy's weights on their way to ranks that only sample: buckets of bytes, through host memory."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openppo.strategy.trainable_model import merged_weights
from openppo.strategy.worlds import Launch

BUCKET_BYTES = 64 * 2**20
"""Of one broadcast, at least one weight."""


@dataclass(frozen=True)
class Transfer:
    """What sending took. ``waited`` are the seconds until all samplers had come to it."""

    seconds: float
    waited: float
    n_bytes: int


class WeightSender:
    """On ranks that train, of which the first sends what all have gathered."""

    def __init__(self, launch: Launch) -> None:
        self._group = launch.between() if launch.rank == 0 else None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Transfer:
        """Send names and whole weights; ranks that train call it together, since gathering is collective."""
        start, n_bytes = time.monotonic(), 0
        _broadcast_bytes(self._group, b"[]")  # samplers have left their engines
        met = time.monotonic()
        for bucket in buckets(weights):
            header = [(name, list(weight.shape), str(weight.dtype)) for name, weight in bucket]
            _broadcast_bytes(self._group, json.dumps(header).encode())
            if self._group is not None:
                payload = torch.cat([_as_bytes(weight) for _, weight in bucket])
                _broadcast(self._group, payload)
                n_bytes += payload.numel()
        _broadcast_bytes(self._group, b"[]")
        return Transfer(time.monotonic() - start, met - start, n_bytes)


@dataclass(frozen=True)
class WholeWeights:
    """``WeightSource`` of a policy that nothing partitions."""

    policy: object

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Nothing to gather."""
        return nullcontext()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight, one by one."""
        return merged_weights(self.policy)


class WeightReceiver:
    """On a rank that samples; writes into the parameters of ``module``, a Hugging Face model."""

    def __init__(self, launch: Launch, module: nn.Module) -> None:
        self._group, self._module = launch.between(), module

    @torch.no_grad()
    def receive(self) -> None:
        """Take the weights that the trainers send now; ``ValueError`` if they are not those of the module."""
        parameters = dict(self._module.named_parameters())
        missing = parameters.keys() | set()
        self._header()
        while header := self._header():
            sizes = []
            for name, shape, dtype in header:
                ours = parameters.get(name)
                if ours is None or [list(ours.shape), str(ours.dtype)] != [shape, dtype]:
                    have = (
                        "nothing of that name"
                        if ours is None
                        else f"{list(ours.shape)} {ours.dtype}"
                    )
                    raise ValueError(
                        f"the trainers' weight {name} is {shape} {dtype}, and this rank has {have}"
                    )
                sizes.append(ours.numel() * ours.element_size())
                missing.remove(name)
            payload = _broadcast(self._group, torch.empty(sum(sizes), dtype=torch.uint8))
            for (name, *_), piece in zip(header, payload.split(sizes), strict=True):
                ours = parameters[name]
                ours.copy_(piece.clone().view(ours.dtype).view(ours.shape))  # a clone is aligned
        if missing:
            raise ValueError(f"the trainers have no weight {min(missing)}, which this rank has")

    def _header(self) -> list[tuple[str, list[int], str]]:
        length = _broadcast(self._group, torch.zeros(1, dtype=torch.int64))
        return json.loads(
            bytes(_broadcast(self._group, torch.empty(int(length), dtype=torch.uint8)).tolist())
        )


def buckets(
    weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in order, together up to ``most`` bytes."""
    bucket: list[tuple[str, Tensor]] = []
    n_bytes = 0
    for name, weight in weights:
        if bucket and n_bytes + weight.nbytes > most:
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append((name, weight))
        n_bytes += weight.nbytes
    if bucket:
        yield bucket


def _as_bytes(weight: Tensor) -> Tensor:
    """Bytes on the host: gloo knows no bfloat16."""
    return weight.detach().contiguous().view(-1).view(torch.uint8).cpu()


def _broadcast_bytes(group: dist.ProcessGroupGloo | None, content: bytes) -> None:
    if group is not None:
        _broadcast(group, torch.tensor([len(content)]))
        _broadcast(group, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _broadcast(group: Any, tensor: Tensor) -> Tensor:
    """From the first rank of ``group`` to the others."""
    group.broadcast([tensor], dist.BroadcastOptions()).wait()
    return tensor
