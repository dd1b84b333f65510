"""The reference of a run that trains on from adapters: the policy that it began with."""

from typing import Any

import torch

from openppo.strategy.ema import TrainedParameters
from openppo.strategy.trainable_model import TrainableModel


class StartReference:
    """The model with the trained parameters that it has at this moment, without gradients, to call at any later one.

    A forward swaps a copy of them in, and afterwards restores the current ones bit for bit. The copy is on the device,
    each rank's share of it. Collective.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.model = model
        self.module = model.module
        self._trained = TrainedParameters(model)
        self._start = self._copies()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model as it began."""
        current = self._copies()
        self._trained.write(self._start)
        output = self.model(*args, **kwargs)
        self._trained.write(current)
        return output

    def _copies(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's share of the parameters."""
        return {name: share.clone() for name, share in self._trained.shares().items()}
