"""Cause of a failure, for the summary that torchrun prints last; needs the standard library only."""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_FILE = "TORCHELASTIC_ERROR_FILE"


def is_summarized() -> bool:
    """True if a launcher asks for the cause of a failure."""
    return bool(os.environ.get(_FILE))


def record_cause(message: str) -> None:
    """Write ``message`` to the file that torchrun's summary quotes; do nothing under other launchers.

    The file has the form of ``torch.distributed.elastic.multiprocessing.errors`` without its ``py_callstack``, which
    the summary would print in place of the message.
    """
    file = os.environ.get(_FILE)
    if not file:
        return

    timestamp = str(int(time.time()))
    cause = {"message": message, "extraInfo": {"timestamp": timestamp}}
    # If torchrun's temporary folder is full or gone, its summary has no message.
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": cause}), encoding="utf-8")


def record_uncaught() -> None:
    """Record the exception that ends a user's own program, beside its traceback."""
    if not is_summarized():
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_cause(traceback.format_exception_only(error)[-1].strip())
        previous(kind, error, trace)

    sys.excepthook = hook
