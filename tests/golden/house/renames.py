"""Differences that are meant, each with its reason; a rename that nothing needs is an error.

``kind`` says what is renamed: a ``metric``, a ``log`` text (part of a line with its placeholders; without ``old``
or ``new`` a whole line), a ``field`` of samples, rows, weights or invariants, or a ``file``. Without ``new`` the old
one is gone, without ``old`` the new one is added. ``cases`` limits it to these; none: all.

    Rename("metric", old="reward_mean", new="reward", reason="one name in all commands")
"""

from dataclasses import dataclass

KINDS = ("metric", "log", "field", "file")


@dataclass(frozen=True)
class Rename:
    """One difference on purpose between what is recorded and what runs leave now."""

    kind: str
    old: str | None = None
    new: str | None = None
    reason: str = ""
    cases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self}: kind is none of {', '.join(KINDS)}"
        assert self.reason, f"{self}: say why in reason"
        assert self.old != self.new, f"{self}: old and new are the same"


RENAMES: tuple[Rename, ...] = ()
