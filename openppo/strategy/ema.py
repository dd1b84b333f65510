"""Exponential moving average of trained parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openppo import logger
from openppo.strategy.checkpoint.model_state import Fragment
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import Interrupted


class TrainedParameters:
    """The trained parameters of ``model``, with LoRA the adapters, to read and write.

    Each rank holds its share: its partition of every parameter under ZeRO-3, else every n-th parameter.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.partitioned = model.deepspeed.zero_optimization_stage() == 3
        self.by_name: dict[str, Any] = {}
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                self.by_name[name] = parameter
        self._optimizer: Any = model.deepspeed.optimizer
        n_ranks = dist.get_world_size()
        self._owner = {name: i % n_ranks for i, name in enumerate(self.by_name)}

    def shares(self) -> dict[str, Tensor]:
        """This rank's share of the parameters, in place."""
        rank = dist.get_rank()
        shares: dict[str, Tensor] = {}
        for name, parameter in self.by_name.items():
            if self.partitioned:
                shares[name] = parameter.ds_tensor.data
            elif self._owner[name] == rank:
                shares[name] = parameter.data
        return shares

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write this rank's share of the parameters, and update the whole on all ranks. Collective."""
        for name, share in self.shares().items():
            share.copy_(values[name])
        if self.partitioned:
            # Drop old values that DeepSpeed keeps gathered; it does the same for its checkpoints.
            self._optimizer.checkpoint_event_prologue()
            self._optimizer.checkpoint_event_epilogue()
        else:
            for name, parameter in self.by_name.items():
                dist.broadcast(parameter.data, self._owner[name])


class ParameterAverage:
    """``average = beta * average + (1 - beta) * parameter``, float32, starting at the parameters.

    The average lies on the device if it needs no more than ``room`` bytes there, else on the host. It covers the
    ``TrainedParameters`` of ``model``, each rank its share. All ranks call each method together.
    """

    def __init__(self, model: TrainableModel, beta: float, room: int = 0) -> None:
        self.beta = beta
        self._trained = TrainedParameters(model)
        shares = self._trained.shares()
        needed = 4 * sum(share.numel() for share in shares.values())
        self._device = average_device(needed, room, model.deepspeed.device)
        self._averages: dict[str, Tensor] = {}
        for name, share in shares.items():
            self._averages[name] = share.to(self._device, torch.float32, copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters to the average; call it after each optimizer step."""
        for name, share in self._trained.shares().items():
            current = share.to(self._device, torch.float32)
            self._averages[name].mul_(self.beta).add_(current, alpha=1 - self.beta)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the parameters by the averages inside the context; restore them bit for bit afterwards.

        The parameters keep their dtype. Weights are restored after ``Interrupted`` and ``OSError``, which every rank
        raises. Other errors may hit one rank only; restoring is collective, so it is skipped and the run ends.
        """
        before = {
            name: share.to("cpu", copy=True) for name, share in self._trained.shares().items()
        }
        self._trained.write(self._averages)
        try:
            yield
        except (Interrupted, OSError):
            self._trained.write(before)
            raise
        self._trained.write(before)

    def fragments(self) -> dict[str, Fragment]:
        """This rank's share of the averages by parameter name, without padding, to read and write."""
        if not self._trained.partitioned:
            return {name: Fragment(0, average.view(-1)) for name, average in self._averages.items()}
        shares = {}
        for name, average in self._averages.items():
            start = dist.get_rank() * average.numel()
            n_left = max(0, self._trained.by_name[name].ds_numel - start)
            shares[name] = Fragment(start, average[:n_left])
        return shares


def average_device(needed: int, room: int, device: Any) -> torch.device:
    """Return ``device`` if it has ``room`` for the ``needed`` bytes, else the host; log it."""
    fits = needed <= room
    if torch.device(device).type != "cpu":
        place = "on the device" if fits else "on the host"
        needed_gib = needed / 2**30
        free_gib = max(0, room) / 2**30
        sizes = f"{needed_gib:.1f} GiB are needed and {free_gib:.1f} GiB are free"
        logger.info("--ema_beta: the average lies %s: %s", place, sizes)
    return torch.device(device if fits else "cpu")
