"""The end of a run by a signal."""


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """Raised when a signal stops the run; its argument is the signal's name, and unfinished work is dropped.

    >>> raise Interrupted("SIGTERM")
    Traceback (most recent call last):
    openppo.stopping.Interrupted: SIGTERM
    """


class StopCheck:
    """Poll for a signal during long work; this default never stops it.

    >>> StopCheck().requested()
    False
    """

    def requested(self) -> bool:
        """True if a signal has reached this rank; it may not have reached the others."""
        return False

    def __call__(self) -> None:
        """Raise ``Interrupted`` on all ranks if a signal has reached any of them. Collective."""
