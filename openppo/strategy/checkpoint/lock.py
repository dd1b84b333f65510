"""One run at a time in a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

logger = logging.getLogger("openppo")

_NAME = ".lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """A POSIX lock on a folder, which ends with this process, however that ends; its children hold nothing."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> str | None:
        """Lock ``folder``, or say which other process holds it. A file system without locks is warned about."""
        file = (folder / _NAME).open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD_BY_ANOTHER:
                logger.warning("%s cannot be locked (%s): see to it that no second run uses it", folder, error)
                return None
            file.seek(0)
            return file.read().strip() or "unknown"
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return None
