"""No run hangs or dies without a word: the ranks watch each other, and one of them reports."""

from openppo.strategy.watch.watch import Watch

__all__ = ["Watch"]
