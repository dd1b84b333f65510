"""How much memory, communication and disk a run takes, from its options and its models' configs alone."""

from openppo.trainer.estimate.checkpoint import checkpoint_bytes
from openppo.trainer.estimate.estimate import Estimate

__all__ = ["Estimate", "checkpoint_bytes"]
