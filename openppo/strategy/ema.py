"""Exponential moving average of trained parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openppo import logger
from openppo.strategy.checkpoint.model_state import Fragment
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import Interrupted


class ParameterAverage:
    """``average = beta * average + (1 - beta) * parameter``, float32, starting at the parameters.

    It lies on the device if it needs no more than ``room`` bytes there, else on the host. It covers the trained
    parameters of ``model``, with LoRA the adapters. Each rank holds its share: its partition of every parameter under
    ZeRO-3, else every n-th parameter. All ranks call each method together.
    """

    def __init__(self, model: TrainableModel, beta: float, room: int = 0) -> None:
        self.beta = beta
        self._optimizer: Any = model.deepspeed.optimizer
        self._partitioned = model.deepspeed.zero_optimization_stage() == 3
        self._trained: dict[str, Any] = {
            n: p for n, p in model.module.named_parameters() if p.requires_grad
        }
        self._owner = {name: i % dist.get_world_size() for i, name in enumerate(self._trained)}
        shares = self._shares()
        self._device = average_device(
            4 * sum(share.numel() for share in shares.values()), room, model.deepspeed.device
        )
        self._averages = {
            name: share.to(self._device, torch.float32, copy=True) for name, share in shares.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters; call it after each optimizer step."""
        for name, share in self._shares().items():
            self._averages[name].mul_(self.beta).add_(
                share.to(self._device, torch.float32), alpha=1 - self.beta
            )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters are the averages, in their own dtype; afterwards they are bit for bit as before.

        Weights are restored after ``Interrupted`` and ``OSError``, which every rank raises. Other errors may hit one
        rank only; restoring is collective, so it is skipped and the run ends.
        """
        before = {name: share.to("cpu", copy=True) for name, share in self._shares().items()}
        self._write(self._averages)
        try:
            yield
        except (Interrupted, OSError):
            self._write(before)
            raise
        self._write(before)

    def fragments(self) -> dict[str, Fragment]:
        """This rank's share of the averages by parameter name, without padding; to read and write."""
        if not self._partitioned:
            return {name: Fragment(0, average.view(-1)) for name, average in self._averages.items()}
        shares = {}
        for name, average in self._averages.items():
            start = dist.get_rank() * average.numel()
            shares[name] = Fragment(start, average[: max(0, self._trained[name].ds_numel - start)])
        return shares

    def _shares(self) -> dict[str, Tensor]:
        """This rank's share of the parameters, to read and write."""
        if self._partitioned:
            return {name: p.ds_tensor.data for name, p in self._trained.items()}
        return {
            name: p.data
            for name, p in self._trained.items()
            if self._owner[name] == dist.get_rank()
        }

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, share in self._shares().items():
            share.copy_(values[name])
        if (
            self._partitioned
        ):  # drop old values that DeepSpeed keeps gathered, as it does for checkpoints
            self._optimizer.checkpoint_event_prologue()
            self._optimizer.checkpoint_event_epilogue()
        else:
            for name, parameter in self._trained.items():
                dist.broadcast(parameter.data, self._owner[name])


def average_device(needed: int, room: int, device: Any) -> torch.device:
    """``device`` if it has ``room`` for the bytes ``needed``, else the host, which is slower; logged."""
    fits, sizes = (
        needed <= room,
        f"{needed / 2**30:.1f} GiB are needed and {max(0, room) / 2**30:.1f} GiB are free",
    )
    if torch.device(device).type != "cpu":
        logger.info(
            "--enable_ema: the average lies %s: %s",
            "on the device" if fits else "on the host",
            sizes,
        )
    return torch.device(device if fits else "cpu")
