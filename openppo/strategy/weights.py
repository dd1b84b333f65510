"""Transfer of the trained policy's weights to ranks that only sample: buckets of bytes, through host memory."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openppo.strategy.trainable_model import merged_weights
from openppo.strategy.worlds import Launch

BUCKET_BYTES = 64 * 2**20
"""Size of one broadcast, which carries at least one weight."""


@dataclass(frozen=True)
class Transfer:
    """Time and size of one transfer of weights."""

    seconds: float
    waited: float
    """Seconds until all samplers were ready to receive."""
    n_bytes: int


class WeightSender:
    """Sender on ranks that train: all gather the weights, the first sends them."""

    def __init__(self, launch: Launch) -> None:
        self._group = launch.between() if launch.rank == 0 else None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Transfer:
        """Send names and whole weights; ranks that train call it together, since gathering is collective."""
        start = time.monotonic()
        _broadcast_bytes(self._group, b"[]")  # returns once the samplers' engines have stopped
        ready = time.monotonic()

        n_bytes = 0
        for bucket in buckets(weights):
            header = [(name, list(weight.shape), str(weight.dtype)) for name, weight in bucket]
            _broadcast_bytes(self._group, json.dumps(header).encode())
            if self._group is not None:
                payload = torch.cat([_as_bytes(weight) for _, weight in bucket])
                _broadcast(self._group, payload)
                n_bytes += payload.numel()
        _broadcast_bytes(self._group, b"[]")
        return Transfer(time.monotonic() - start, ready - start, n_bytes)


@dataclass(frozen=True)
class WholeWeights:
    """``WeightSource`` of a policy whose weights are not partitioned."""

    policy: object

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and weight, one by one."""
        return merged_weights(self.policy)


class WeightReceiver:
    """Receiver on a rank that samples; writes into the parameters of ``module``, a Hugging Face model."""

    def __init__(self, launch: Launch, module: nn.Module) -> None:
        self._group = launch.between()
        self._module = module

    @torch.no_grad()
    def receive(self) -> None:
        """Receive the weights that the trainers send; ``ValueError`` if the module has other ones."""
        parameters = dict(self._module.named_parameters())
        missing = set(parameters)
        self._header()
        while header := self._header():
            sizes = []
            for name, shape, dtype in header:
                parameter = _matching_parameter(parameters, name, shape, dtype=dtype)
                sizes.append(parameter.numel() * parameter.element_size())
                missing.remove(name)

            payload = _broadcast(self._group, torch.empty(sum(sizes), dtype=torch.uint8))
            for entry, piece in zip(header, payload.split(sizes), strict=True):
                parameter = parameters[entry[0]]
                aligned = piece.clone()
                parameter.copy_(aligned.view(parameter.dtype).view(parameter.shape))
        if missing:
            raise ValueError(f"the trainers have no weight {min(missing)}, which this rank has")

    def _header(self) -> list[tuple[str, list[int], str]]:
        """Receive name, shape and dtype of each weight of a bucket; an empty header ends the transfer."""
        length = _broadcast(self._group, torch.zeros(1, dtype=torch.int64))
        content = _broadcast(self._group, torch.empty(int(length), dtype=torch.uint8))
        return json.loads(bytes(content.tolist()))


def _matching_parameter(
    parameters: Mapping[str, Tensor], name: str, shape: list[int], dtype: str
) -> Tensor:
    """Return the parameter ``name``; ``ValueError`` if it is missing, or differs in shape or dtype."""
    parameter = parameters.get(name)
    if parameter is None:
        present = "nothing of that name"
    elif list(parameter.shape) != shape or str(parameter.dtype) != dtype:
        present = f"{list(parameter.shape)} {parameter.dtype}"
    else:
        return parameter
    raise ValueError(f"the trainers' weight {name} is {shape} {dtype}, and this rank has {present}")


def buckets(
    weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights in order, in buckets of up to ``limit`` bytes but at least one weight."""
    bucket: list[tuple[str, Tensor]] = []
    n_bytes = 0
    for name, weight in weights:
        if bucket and n_bytes + weight.nbytes > limit:
            yield bucket
            bucket = []
            n_bytes = 0
        bucket.append((name, weight))
        n_bytes += weight.nbytes
    if bucket:
        yield bucket


def _as_bytes(weight: Tensor) -> Tensor:
    """Return the bytes of ``weight`` on the host: gloo has no bfloat16."""
    flat = weight.detach().contiguous().view(-1)
    return flat.view(torch.uint8).cpu()


def _broadcast_bytes(group: dist.ProcessGroupGloo | None, content: bytes) -> None:
    """Broadcast the number of bytes, then the bytes."""
    if group is not None:
        _broadcast(group, torch.tensor([len(content)]))
        _broadcast(group, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _broadcast(group: Any, tensor: Tensor) -> Tensor:
    """Broadcast ``tensor``, in place, from the first rank of ``group`` to the others."""
    group.broadcast([tensor], dist.BroadcastOptions()).wait()
    return tensor
