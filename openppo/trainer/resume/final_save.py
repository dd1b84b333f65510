"""What was trained outlives a disk that is full at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openppo.strategy.checkpoint import CheckpointError
from openppo.trainer.resume.checkpointer import Checkpointer


@contextmanager
def keeping_what_was_trained(
    checkpointer: Checkpointer | None, step: int, save_checkpoint: Callable[[], Path]
) -> Iterator[None]:
    """Around the writing of the model that ``step`` steps have trained; it raises ``OSError`` on all ranks or none.

    Then a checkpoint of that step is looked for, else written, and the error says how to get the model from it;
    ``CheckpointError`` if there is none and none can be written.
    """
    try:
        yield
    except OSError as error:
        if checkpointer is None:
            raise
        try:
            kept = checkpointer.kept(step) or save_checkpoint()
        except CheckpointError as failure:
            raise CheckpointError(
                f"{error}. Nor could a checkpoint be written, so that what was trained since the last one is lost: "
                f"{failure}"
            ) from error
        raise OSError(
            f"{error}. All that was trained is in {kept}: make room, or choose another --save_path beside "
            f"--ckpt_path {kept.parent}, and the same command with --load_checkpoint writes the model."
        ) from error
