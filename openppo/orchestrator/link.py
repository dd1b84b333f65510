"""Messages between the coordinator and the ranks that sample, over a connection of this machine."""

import pickle
import secrets
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal

from openppo.orchestrator.schedule import Start
from openppo.rollout.tasks import RunTask
from openppo.types import Prompt


@dataclass(frozen=True)
class Play:
    """Play these groups; tasks that have ``joined`` meanwhile come with their prompts."""

    starts: list[Start]
    joined: list[tuple[RunTask, list[Prompt]]]


@dataclass(frozen=True)
class Pause:
    """Leave the engine: for ``weights`` of ``version``, for a ``batch`` that is complete, or at the ``end``."""

    reason: Literal["weights", "batch", "end"]
    version: int = -1


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
        key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1", 0), authkey=key, backlog=n_workers)
        host, port, *_ = self._listener.address
        self.address = f"{host} {port} {key.hex()}"

    def accept(self) -> Link:
        """The next worker's link."""
        return Link(self._listener.accept())

    def close(self) -> None:
        """Take no more."""
        self._listener.close()


def connect(address: str) -> Link:
    """A worker's link to the coordinator of this ``address``."""
    host, port, key = address.split()
    return Link(Client((host, int(port)), authkey=bytes.fromhex(key)))
