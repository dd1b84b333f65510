"""The tasks of a run over HTTP: what they have come to, other ratios while it runs, programs that join it."""

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
from openppo.rollout.tasks import TaskControl

_CHANGES = {"ratio": (float, int), "max_concurrent": (int,)}


class TaskServer:
    """``GET /tasks``, ``POST /tasks/{name} {"ratio", "max_concurrent"}`` and ``POST /tasks`` with the fields of a task.

    It listens at a free port of this machine, on a thread of its own. ``file``, which only its owner can read, gets the
    address and the token that a request must have as ``Authorization: Bearer TOKEN``.
    """

    def __init__(self, control: TaskControl, file: Path) -> None:
        self.control = control
        self.file = file
        self._token = secrets.token_hex(16)
        listener = listen("127.0.0.1", 0)
        address = {
            "url": f"http://127.0.0.1:{listener.getsockname()[1]}/tasks",
            "token": self._token,
        }
        app = web.Application(middlewares=[self._checked])
        app.add_routes([web.get("/tasks", self._progress), web.post("/tasks", self._join)])
        app.add_routes([web.post("/tasks/{name}", self._change)])
        self._loop, self._runner = asyncio.new_event_loop(), app_runner(app)
        threading.Thread(target=self._loop.run_forever, name="tasks", daemon=True).start()

        async def start() -> None:
            self._server = await serve(self._runner, listener)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            json.dump(address, opened)
        logger.info(
            "tasks can be watched and changed while the run lasts: %s has address and token", file
        )

    def close(self) -> None:
        """Answer no more."""
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.file.unlink(missing_ok=True)

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        try:
            if not hmac.compare_digest(
                given.encode(errors="surrogateescape"), self._token.encode()
            ):
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
            await asyncio.to_thread(
                self.control.join, body
            )  # it reads data, and asks whether the program is there
        except ValueError as error:
            raise Refused(str(error)) from error
        return web.json_response(self.control.progress()[body["name"]], status=201)

    async def _change(self, request: web.Request) -> web.Response:
        body, name = read_body(await body_of(request)), request.match_info["name"]
        changes: dict[str, Any] = {what: body.pop(what, None) for what in _CHANGES}
        for what, value in changes.items():
            is_number = isinstance(value, _CHANGES[what]) and not isinstance(value, bool)
            if value is not None and not (
                is_number and value > 0 and (what != "ratio" or value < 1)
            ):
                raise Refused(
                    f"{what} {value!r}: send a ratio between 0 and 1, a max_concurrent of 1 or more."
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
