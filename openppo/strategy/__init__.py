"""DeepSpeed and the process group, for any ``nn.Module``; names load on first use."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.strategy.deepspeed import (
        DeepspeedStrategy as DeepspeedStrategy,
        get_strategy as get_strategy,
    )
    from openppo.strategy.trainable_model import TrainableModel as TrainableModel

__getattr__, __dir__, __all__ = lazy_names(__name__)
