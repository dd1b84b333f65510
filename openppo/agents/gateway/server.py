"""An OpenAI-compatible address for the sessions of unmodified programs, on the event loop of their episodes."""

import asyncio
import json
import math
import re
import resource
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from types import ModuleType
from typing import Any

from aiohttp import web

from openppo import logger
from openppo.agents.gateway import chat, responses
from openppo.agents.gateway.requests import READ, RULES, Asked, Refused, read_body
from openppo.agents.renderer import Renderer
from openppo.agents.session import EpisodeEnded, Session, Turn
from openppo.datasets.templates import Message, shortened
from openppo.rewards.server import listen
from openppo.types import Ending

KEEP_ALIVE = 10.0
"""Seconds without a turn after which a stream gets a comment, so that clients and proxies stay."""
_MOST_BYTES = 64 * 2**20
_TOO_LONG = (Ending.CONTEXT_FULL, Ending.EPISODE_LENGTH)


_ENDPOINTS = {"chat/completions": chat, "responses": responses}
"""Modules that ``read`` a request, and make the ``whole`` answer of turns or ``lines`` of a stream."""


@dataclass
class Posted:
    """What a program said of its episode: rewards by name, and that it is complete."""

    reward: dict[str, float] | None = None
    completed: bool = False


@dataclass(eq=False)
class _Answer:
    """The turns of one request, and of its repetitions by an SDK. Undelivered turns are not trained on."""

    digest: bytes
    asked: Asked
    work: asyncio.Task[list[Turn]]
    made: list[Turn]
    """Turns that are in the session already."""
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        """Whether there will be no turns."""
        return self.work.cancelling() > 0 or (self.work.done() and self.work.exception() is not None)

    def turns(self) -> list[Turn]:
        """The turns; ``Refused`` says why there are none."""
        if self.work.cancelled():
            raise Refused("the episode has ended.", code="episode_ended")
        error = self.work.exception()
        if isinstance(error, EpisodeEnded):
            code = "context_length_exceeded" if error.ending in _TOO_LONG else "episode_ended"
            raise Refused(f"the episode has ended ({error.ending.value}): the model answers no more.", code=code)
        if isinstance(error, ValueError):
            raise Refused(str(error))
        if error is not None:
            logger.error("a request of an agent failed: %r", error)
            raise Refused(f"the gateway failed: {error!r}", 500)
        return self.work.result()

    def left_by_client(self, delivered: bool) -> None:
        """A client has its answer, or has hung up; the last one that hangs up frees the rows."""
        self.waiting -= 1
        self.delivered |= delivered
        if self.waiting == 0 and len(self.made) < self.asked.n:
            self.work.cancel()  # which nothing comes of once it is done
        if self.delivered:
            for turn in self.work.result():
                turn.trained = True


@dataclass(eq=False)
class _Client:
    """What one key stands for."""

    session: Session
    posted: Posted = field(default_factory=Posted)
    answers: dict[str, _Answer] = field(default_factory=dict)
    """By the numbers in their ids."""

    def repeated(self, digest: bytes) -> _Answer | None:
        """The answer to an equal request, if possible one that nobody has received."""
        equal = [answer for answer in self.answers.values() if answer.digest == digest and not answer.failed]
        return min(reversed(equal), key=lambda answer: answer.delivered, default=None)

    def answered(self, number: str) -> _Answer:
        """The answer of an id."""
        answer = self.answers.get(re.sub("^.*[-_]", "", number))
        if answer is None or not answer.work.done():
            raise Refused(f"{shortened(number)} is no answer of this episode.", 404)
        return answer

    def conversation(self, number: str) -> list[Message]:
        """Messages up to the end of an answer, without the instructions of its request."""
        answer = self.answered(number)
        return [*answer.asked.messages[answer.asked.instructed :], answer.turns()[0].message]


class Gateway:
    """Sessions behind keys. All of it takes place in one event loop, that of the sessions.

    A key is the bearer token of a request, or part of its path, as in ``base_url``. ``Session.chat`` does the work:
    requests become its arguments, its turns become answers, and streams are cut from whole turns.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = listen(host, port)
        self.address = "http://{}:{}".format(f"[{host}]" if ":" in host else host, self._listener.getsockname()[1])
        self._clients: dict[str, _Client] = {}
        self._said: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begin to answer."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each request of an agent is an open file
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_errors_as_json])
        routes = [web.get("/healthz", _health)]
        for base in ("/v1", "/s/{key}/v1"):
            routes += [web.post(f"{base}/{at}", partial(self._answer, each)) for at, each in _ENDPOINTS.items()]
            routes += [web.get(f"{base}/models", self._models)]
        for base in ("/v1", "/s/{key}/v1", "/sessions/{key}"):
            routes += [web.post(f"{base}/{end}", self._take_reward) for end in ("reward", "complete")]
        app.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=5)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener, backlog=4096).start()

    async def stop(self) -> None:
        """End all requests and close the port."""
        for key in list(self._clients):
            self.close(key)
        if self._runner is not None:
            await self._runner.cleanup()
        self._listener.close()

    def open(self, session: Session, key: str | None = None) -> str:
        """The key of a session."""
        key = key or f"sk-{secrets.token_hex(16)}"
        self._clients[key] = _Client(session)
        return key

    def base_url(self, key: str) -> str:
        """What a program has as OPENAI_BASE_URL; with ``/reward`` or ``/complete`` appended it takes rewards."""
        return f"{self.address}/s/{key}/v1"

    def close(self, key: str) -> Posted:
        """Take a key back; what is under way for it is cancelled."""
        client = self._clients.pop(key)
        for answer in client.answers.values():
            answer.work.cancel()
        return client.posted

    def unknown(self, key: str) -> Session:
        """The session of a key that was not given out; ``Refused``."""
        raise Refused("this key is not, or no longer, that of an episode: use OPENAI_API_KEY or OPENAI_BASE_URL.", 401)

    def _client(self, request: web.Request) -> _Client:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("key", bearer)
        if key not in self._clients:
            self.open(self.unknown(key), key)
        return self._clients[key]

    async def _answer(self, endpoint: ModuleType, request: web.Request) -> web.StreamResponse:
        """Turns for a request; those of an equal one where an SDK repeats it."""
        raw = await request.read()
        client, digest, answer = self._client(request), sha256(request.path.encode() + raw).digest(), None
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            client.session.counts["retries"] += 1
            answer = client.repeated(digest)
        if answer is None:
            asked = endpoint.read(read_body(raw), client.conversation)
            self._say_what_has_no_effect(client.session, asked)
            made: list[Turn] = []
            answer = _Answer(digest, asked, asyncio.ensure_future(_turns(client.session, asked, made)), made)
            client.answers[answer.number] = answer
        answer.waiting += 1
        delivered, sent = False, web.StreamResponse()
        try:
            sent = await _send(endpoint, request, answer, client.session.setup.renderer)
            delivered = True
        except ConnectionResetError:
            pass  # the client has hung up
        finally:
            answer.left_by_client(delivered)
        return sent

    def _say_what_has_no_effect(self, session: Session, asked: Asked) -> None:
        """Count sampling options of clients, and log each field without effect once."""
        overridden = asked.without_effect(session.setup.params)
        session.counts["sampling_overridden"] += bool(overridden)
        for name in sorted({*overridden, *asked.body.keys() - {*READ, *RULES}} - self._said):
            self._said.add(name)
            logger.warning("an agent's requests have %s, which has no effect here: the run's options decide", name)

    async def _take_reward(self, request: web.Request) -> web.Response:
        """Take a reward, of the episode or of one answer, or the word that the episode is complete."""
        body, completes = read_body(await request.read()), request.path.endswith("/complete")
        client = self._client(request)
        given = body.get("reward", {} if completes else None)
        named: dict[str, Any] = given if isinstance(given, dict) else {"reward": given}
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in named.values()):
            raise Refused(f'reward {shortened(given)}: send {{"reward": NUMBER}}, or numbers by name.')
        if (number := body.get("turn")) is not None:
            client.session.reward(sum(named.values()), client.answered(number).turns()[0])
        elif named:
            client.posted.reward = (client.posted.reward or {}) | {name: float(named[name]) for name in named}
        if completes:
            client.posted.completed = True
            client.session.close(Ending.COMPLETED)
        return web.json_response({"reward": client.posted.reward, "completed": client.posted.completed})

    async def _models(self, request: web.Request) -> web.Response:
        self._client(request)
        model = {"id": "openppo", "object": "model", "created": 0, "owned_by": "openppo"}
        return web.json_response({"object": "list", "data": [model]})


async def _turns(session: Session, asked: Asked, made: list[Turn]) -> list[Turn]:
    """The ``n`` turns that are asked for, also put into ``made``; not trained on until a client has them."""

    async def turn() -> Turn:
        made.append(await session.chat(asked.messages, asked.tools, **asked.limits))
        made[-1].trained = False
        return made[-1]

    tasks = [asyncio.ensure_future(turn()) for _ in range(asked.n)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # where one of them failed


async def _send(endpoint: ModuleType, request: web.Request, answer: _Answer, renderer: Renderer) -> web.StreamResponse:
    """Wait for the turns and write the answer."""
    streams, stream = bool(answer.asked.body.get("stream")), web.StreamResponse()
    stream.headers.update({"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    while not answer.work.done():
        await asyncio.wait([answer.work], timeout=KEEP_ALIVE)
        if streams and not answer.work.done():
            await stream.prepare(request)
            await stream.write(b": keep-alive\n\n")
    try:
        whole = endpoint.whole(answer.asked, answer.turns(), renderer, answer.number, answer.created)
        text = "".join(endpoint.lines(whole, answer.asked)) if streams else ""
    except Refused as refused:
        if not stream.prepared:
            raise
        text = f"event: error\ndata: {json.dumps(refused.json)}\n\n"
    sent: web.StreamResponse = stream if streams else web.json_response(whole)
    await sent.prepare(request)
    if streams:
        await stream.write(text.encode())
    await sent.write_eof()
    return sent


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPException as error:
        refused = Refused(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
    return web.json_response(refused.json, status=refused.status, headers={"x-should-retry": "false"})
