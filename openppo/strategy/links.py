"""Connections between processes of this machine, for whole objects."""

import pickle
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class Link:
    """One end of a connection; ``receive`` raises ``EOFError`` or ``OSError`` once the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = Connection(connection.detach())

    def send(self, message: Any) -> None:
        """Send any object; ``OSError`` if the other end is gone."""
        # The connection's own ``send`` would share the memory of tensors.
        self._connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Return the next message."""
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301 (only this user can connect)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class Entrance:
    """Unix socket at ``address``, in a folder that only this user can enter, until ``close``.

    ``ValueError`` if the folder of temporary files has too long a path for a socket.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="openppo-")
        self.address = str(Path(self._folder.name, "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.address)
        except OSError as error:  # has a number only if it comes from the system
            self._listener.close()
            self._folder.cleanup()
            place = f"no socket can be made in the folder of temporary files: {self.address}"
            if error.errno is not None:
                raise ValueError(f"{place} ({error}). Set TMPDIR to another folder.") from error
            n_bytes = len(self.address.encode())
            raise ValueError(
                f"{place} has {n_bytes} bytes. Set TMPDIR to a folder with a shorter path."
            ) from error
        self._listener.listen()

    def accept(self) -> Link:
        """Return the next connection, which may not be a worker's; ``OSError`` once the entrance is closed."""
        return Link(self._listener.accept()[0])

    def close(self) -> None:
        """Refuse further connections, and remove the folder."""
        with suppress(OSError):  # already closed
            self._listener.shutdown(socket.SHUT_RDWR)  # ends an ``accept`` under way
        self._listener.close()
        self._folder.cleanup()


def connect(address: str) -> Link:
    """Return a worker's link to the coordinator at ``address``."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return Link(connection)
