"""DeepSpeed and the process group. Knows ``nn.Module`` only; names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.strategy.deepspeed import DeepspeedStrategy, get_strategy
    from openppo.strategy.trainable_model import TrainableModel

_HOME = {"DeepspeedStrategy": "deepspeed", "get_strategy": "deepspeed", "TrainableModel": "trainable_model"}

__all__ = ["DeepspeedStrategy", "TrainableModel", "get_strategy"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
