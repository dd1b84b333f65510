"""Size of a checkpoint on disk."""

from __future__ import annotations

_TRAINED = 4 + 8  # float32 weight and two moments of Adam
_AVERAGE = 4


def checkpoint_bytes(n_actor: int, n_critic: int = 0, ema: bool = False) -> int:
    """Bytes of one checkpoint of all ranks together, from the numbers of trained parameters (``n_trained``).

    Frozen weights are not in it. Not counted are schedulers, random states and metadata: kilobytes for each rank.
    """
    return _TRAINED * (n_actor + n_critic) + (_AVERAGE * n_actor if ema else 0)
