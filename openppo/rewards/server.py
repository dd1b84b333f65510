"""A reward model behind HTTP, in the JSON that ``rewards/http.py`` and OpenRLHF's clients speak."""

import asyncio
import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from openppo import logger
from openppo.config import ServeRMConfig
from openppo.rewards.http_server import app_runner, body_of, serve


@dataclass
class RewardServer:
    """Answers POST / and /get_reward with rewards, and GET /health, which needs no token.

    Texts of all requests wait in one queue. ``score`` gets up to ``config.max_batch_size`` of them at a time, as token
    ids from ``encode``; each of the two has its own thread, so that the server can answer meanwhile. ``listener`` is
    bound to the address. With ``token``, requests must carry it.
    """

    score: Callable[[list[list[int]]], list[float]]
    encode: Callable[[str], list[int]]
    listener: socket.socket
    config: ServeRMConfig
    token: str | None = None

    def __post_init__(self) -> None:
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="reward_model")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._waiting: asyncio.Queue[tuple[list[int], asyncio.Future[Any]]] = asyncio.Queue()

    def fit(self) -> None:
        """Serve until SIGTERM or SIGINT; requests under way are answered first."""
        asyncio.run(self._serve())

    def close(self) -> None:
        """End the threads."""
        self._scoring.shutdown()
        self._encoding.shutdown()

    async def _serve(self) -> None:
        """Serve until a signal, then answer the requests under way."""
        max_bytes = int(self.config.max_request_mb * 2**20)
        app = web.Application(client_max_size=max_bytes, middlewares=[self._as_json])
        posts = [web.post(path, self._rewards) for path in ("/", "/get_reward")]
        app.add_routes([web.get("/health", self._health), *posts])
        runner = app_runner(app, handler_cancellation=True)
        server = await serve(runner, self.listener)

        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end.set)
        host, port = self.listener.getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        logger.info("rewards are served at http://%s:%d/get_reward", shown_host, port)

        work = loop.create_task(self._work())
        await end.wait()
        logger.info("ending: answering the requests under way")
        server.close()
        await runner.cleanup()
        work.cancel()

    async def _work(self) -> None:
        """Score the waiting texts, batch by batch, for ever; each text gets its score, or the exception."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.config.max_batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # Leave out the texts of clients that have gone.
            batch = [(row, reward) for row, reward in batch if not reward.cancelled()]
            if not batch:
                continue

            rows = [row for row, _ in batch]
            outcome = loop.run_in_executor(self._scoring, self.score, rows)
            await asyncio.wait([outcome])
            error = outcome.exception()
            scores = outcome.result() if error is None else [error] * len(batch)
            for (_, reward), score in zip(batch, scores, strict=True):
                if not reward.cancelled():
                    reward.set_result(score)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer that the server is up, with its model."""
        answer = {"status": "ok"}
        if self._may_ask(request):  # a path reveals much
            answer["model"] = self.config.reward_pretrain
        return web.json_response(answer)

    async def _rewards(self, request: web.Request) -> web.Response:
        """Answer with the rewards of a request's texts."""
        loop = asyncio.get_running_loop()
        try:
            body = await body_of(request)
        except web.HTTPRequestEntityTooLarge as error:
            max_mb = self.config.max_request_mb
            text = f"the request has over {max_mb:g} MiB: send fewer texts, or raise --max_request_mb of the server"
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, text=text) from error

        rows = await loop.run_in_executor(self._encoding, self._rows, body)
        rewards: list[asyncio.Future[Any]] = [loop.create_future() for _ in rows]
        for item in zip(rows, rewards, strict=True):
            self._waiting.put_nowait(item)
        scores = await asyncio.gather(*rewards)

        failed = next((score for score in scores if isinstance(score, BaseException)), None)
        if failed is not None:
            logger.error("the reward model failed: %r", failed)
            raise web.HTTPInternalServerError(text=f"the reward model failed: {failed!r}")
        return web.json_response({"rewards": scores})

    def _rows(self, body: bytes) -> list[list[int]]:
        """Token ids of the texts of a request; ``HTTPBadRequest`` if they cannot be read."""
        try:
            return [self.encode(text) for text in _queries(body)]
        except ValueError as error:  # a token without an embedding in the model
            raise web.HTTPBadRequest(text=str(error)) from error

    @web.middleware
    async def _as_json(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Require the token, and answer errors in JSON."""
        try:
            if request.path != "/health" and not self._may_ask(request):
                raise web.HTTPUnauthorized(
                    text="send the server's token as 'Authorization: Bearer TOKEN'"
                )
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": error.text or error.reason}, status=error.status)

    def _may_ask(self, request: web.Request) -> bool:
        """True if the request has the token, or none is required."""
        if self.token is None:
            return True
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        return hmac.compare_digest(header, f"Bearer {self.token}".encode())


def listen(host: str, port: int, flags: str = "--host {} --port {}") -> socket.socket:
    """Bind a socket to the address; ``ValueError`` naming ``flags`` of a command if that is not possible."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"{flags.format(host, port)}: cannot listen there ({error}). Choose another."
        ) from error
    return listener


def _queries(body: bytes) -> list[str]:
    """Read the texts of a request; ``HTTPBadRequest`` for anything else."""
    try:
        queries = json.loads(body)["query"]
        "".join(queries).encode()  # fails for half of a surrogate pair
    except (ValueError, TypeError, KeyError, RecursionError):
        queries = None
    if not isinstance(queries, list):
        request = '{"query": [texts]}; "prompts" and "labels" may be there too'
        raise web.HTTPBadRequest(text=f"the request must be JSON, {request}")
    return queries
