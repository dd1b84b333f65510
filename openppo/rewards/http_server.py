"""HTTP servers that no client can stop: bounds on connections, bodies and waiting."""

import asyncio
import logging
import resource
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

SECONDS_IDLE = 120.0
"""Limit for the head of a connection's first or next request."""
SECONDS_TO_READ = 60.0
"""Limit for the body of a request."""
MOST_CONNECTIONS = 8192
_FILES_OF_OTHERS = 64
_MALFORMED = HttpProcessingError, web.RequestPayloadError

_log = logging.getLogger("openppo.http")


def app_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """Make a runner of ``app`` that drops silent connections and logs malformed requests in one line."""
    options |= {"access_log": None, "keepalive_timeout": SECONDS_IDLE, "logger": _log}
    return web.AppRunner(app, **options)


async def serve(
    runner: web.AppRunner, listener: socket.socket, backlog: int = 128
) -> asyncio.Server:
    """Answer at ``listener`` until the result is closed; ``runner.cleanup`` then ends the requests under way."""
    await runner.setup()
    assert runner.server is not None
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_connections = MOST_CONNECTIONS
    if n_files != resource.RLIM_INFINITY:
        n_connections = min(n_connections, max(1, n_files - _FILES_OF_OTHERS))

    door = _Door(runner.server, n_connections)
    loop = asyncio.get_running_loop()
    return await loop.create_server(door, sock=listener, backlog=backlog)


async def body_of(request: web.Request, most: int | None = None) -> bytes:
    """Read the body of a request; ``HTTPException`` if it is malformed, late or too long.

    The body has at most ``most`` bytes; None means the limit of the application.
    """
    limited = request if most is None else request.clone(client_max_size=most)
    try:
        async with asyncio.timeout(SECONDS_TO_READ):
            return await limited.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(
            text=f"the request was not sent within {SECONDS_TO_READ:g} s"
        ) from error
    except _MALFORMED as error:
        raise web.HTTPBadRequest(
            text=f"the body is not what its headers say: {_in_short(error)}"
        ) from error


class _Door:
    """Factory of each connection's protocol; beyond ``most`` open connections the protocol answers 503."""

    def __init__(self, server: web.Server, most: int) -> None:
        self.server = server
        self.most = most
        self.has_warned = False

    def __call__(self) -> asyncio.Protocol:
        if len(self.server.connections) < self.most:
            return self.server()
        if not self.has_warned:
            self.has_warned = True
            _log.warning(
                "%d connections are open, no more are served: new ones are answered with 503",
                self.most,
            )
        return _Busy()


class _Busy(asyncio.Protocol):
    """Protocol that answers 503, so that clients try again, and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        transport.close()


def _in_one_line(record: logging.LogRecord) -> bool:
    """Shorten aiohttp's log record of a request that is not HTTP to one line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, _MALFORMED):
        sender = record.args[0] if isinstance(record.args, tuple) and record.args else "a client"
        record.msg = "%s sent a request that is no HTTP: %s"
        record.args = (sender, _in_short(error))
        record.exc_info = None
        record.levelno = min(record.levelno, logging.WARNING)
        record.levelname = logging.getLevelName(record.levelno)
    return True


def _in_short(error: Exception) -> str:
    """Message of an error in one line of at most 200 characters."""
    message = error.message if isinstance(error, HttpProcessingError) else str(error)
    return " ".join(message.split())[:200] or type(error).__name__


_log.addFilter(_in_one_line)
