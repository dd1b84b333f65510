"""Connections between processes of this machine, for whole objects."""

import pickle
import secrets
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any


class Link:
    """One end of a connection. ``receive`` raises ``EOFError`` or ``OSError`` once the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Send any object; ``OSError`` if the other end is gone."""
        self._connection.send_bytes(pickle.dumps(message))  # its own ``send`` would share memory for tensors

    def receive(self) -> Any:
        """The next message."""
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301 (only who has the key is connected)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class Entrance:
    """Where workers connect, with the key that ``address`` ends with."""

    def __init__(self, n_workers: int) -> None:
        key, self._is_closed = secrets.token_bytes(32), False
        self._listener = Listener(("127.0.0.1", 0), authkey=key, backlog=n_workers)
        host, port, *_ = self._listener.address
        self.address = f"{host} {port} {key.hex()}"

    def accept(self) -> Link:
        """The next worker's link; others that come are sent away. ``OSError`` once it is closed."""
        while True:
            try:
                return Link(self._listener.accept())
            except (EOFError, AuthenticationError, OSError):
                if self._is_closed:
                    raise

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True
        self._listener.close()


def connect(address: str) -> Link:
    """A worker's link to the coordinator of this ``address``."""
    host, port, key = address.split()
    return Link(Client((host, int(port)), authkey=bytes.fromhex(key)))
