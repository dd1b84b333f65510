"""An HTTP server to watch, change and join the tasks of a run."""

import asyncio
import hmac
import json
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from openppo import logger
from openppo.agents.gateway.requests import Refused, read_body
from openppo.rewards.http_server import app_runner, body_of, serve
from openppo.rewards.server import listen
from openppo.sources.task import TaskControl

_CHANGES = {"ratio": (float, int), "max_concurrent": (int,)}
"""Fields that can be changed, with the types of their values."""


class TaskServer:
    """Server of ``GET /tasks``, ``POST /tasks/{name}`` with ratio and max_concurrent, and ``POST /tasks`` to join.

    It listens at a free port of this machine, on its own thread. ``file``, which only its owner can read, gets the
    address, and the token that a request must have as ``Authorization: Bearer TOKEN``.
    """

    def __init__(self, control: TaskControl, file: Path) -> None:
        self.control = control
        self.file = file
        self._token = secrets.token_hex(16)
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        address = {"url": f"http://127.0.0.1:{port}/tasks", "token": self._token}

        app = web.Application(middlewares=[self._checked])
        routes = [
            web.get("/tasks", self._progress),
            web.post("/tasks", self._join),
            web.post("/tasks/{name}", self._change),
        ]
        app.add_routes(routes)
        self._loop = asyncio.new_event_loop()
        self._runner = app_runner(app)
        threading.Thread(target=self._loop.run_forever, name="tasks", daemon=True).start()

        async def start() -> None:
            self._server = await serve(self._runner, listener)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result()

        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            json.dump(address, opened)
        logger.info(
            "tasks can be watched and changed while the run lasts: %s has address and token", file
        )

    def close(self) -> None:
        """Stop the server and remove its file."""
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.file.unlink(missing_ok=True)

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        is_right = hmac.compare_digest(token.encode(errors="surrogateescape"), self._token.encode())
        try:
            if not is_right:
                raise Refused(
                    f"send the token of {self.file.name} as 'Authorization: Bearer TOKEN'.", 401
                )
            return await handler(request)
        except Refused as error:
            refused = error
        except web.HTTPException as error:
            refused = Refused(
                f"{request.method} {request.path}: {error.text or error.reason}", error.status
            )
        return web.json_response(refused.json, status=refused.status)

    async def _progress(self, _: web.Request) -> web.Response:
        return web.json_response(self.control.progress())

    async def _join(self, request: web.Request) -> web.Response:
        body = read_body(await body_of(request))
        try:
            # On a thread, since it reads data and checks that the program answers.
            await asyncio.to_thread(self.control.register, body)
        except ValueError as error:
            raise Refused(str(error)) from error
        return web.json_response(self.control.progress()[body["name"]], status=201)

    async def _change(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        body = read_body(await body_of(request))
        changes: dict[str, Any] = {key: body.pop(key, None) for key in _CHANGES}
        for key, value in changes.items():
            if value is not None and not _is_valid(key, value):
                raise Refused(
                    f"{key} {value!r}: send a ratio between 0 and 1, a max_concurrent of 1 or more."
                )
        if body or set(changes.values()) == {None}:
            raise Refused("send ratio, max_concurrent or both, and nothing else.")
        try:
            self.control.change(name, **changes)
        except KeyError as error:
            raise Refused(
                f"there is no task {name!r}; tasks are {', '.join(self.control.progress())}.", 404
            ) from error
        return web.json_response(self.control.progress()[name])


def _is_valid(key: str, value: Any) -> bool:
    """True for a value that field ``key`` may be changed to."""
    if isinstance(value, bool) or not isinstance(value, _CHANGES[key]):
        return False
    return value > 0 and (key != "ratio" or value < 1)
