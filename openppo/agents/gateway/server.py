"""An OpenAI-compatible address for the sessions of unmodified programs, on the event loop of their episodes."""

import asyncio
import json
import math
import resource
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from aiohttp import web

from openppo import logger
from openppo.agents.gateway import chat, responses
from openppo.agents.gateway.requests import ADVISORY, READ, Asked, Refused, read_body
from openppo.agents.session import EpisodeEnded, Session, Turn
from openppo.datasets.templates import Message, shortened
from openppo.rewards.server import listen
from openppo.types import Ending

KEEP_ALIVE = 10.0
"""Seconds without a turn after which a stream gets a comment, so that clients and proxies stay."""
_MOST_BYTES = 64 * 2**20
_TOO_LONG = (Ending.CONTEXT_FULL, Ending.EPISODE_LENGTH)


@dataclass(frozen=True)
class _Endpoint:
    """How requests are read, and turns become a whole answer or lines of a stream."""

    read: Callable[[dict[str, Any], Callable[[str], list[Message]]], Asked]
    whole: Callable[..., dict[str, Any]]
    lines: Callable[[dict[str, Any], Asked], Iterator[str]]


_ENDPOINTS = {
    "chat/completions": _Endpoint(chat.read_chat, chat.completion, chat.lines),
    "responses": _Endpoint(responses.read_responses, responses.response, responses.lines),
}


@dataclass
class Posted:
    """What a program said of its episode: rewards by name, and that it is complete."""

    reward: dict[str, float] | None = None
    completed: bool = False


@dataclass(eq=False)
class _Answer:
    """The turns of one request, and of its repetitions by an SDK. Undelivered turns are not trained on."""

    asked: Asked
    work: asyncio.Task[list[Turn]]
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: int = 0
    delivered: bool = False

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
        if not self.work.done():
            if self.waiting == 0:
                self.work.cancel()
        elif not self.work.cancelled() and self.work.exception() is None:
            for turn in self.work.result():
                turn.trained = self.delivered


@dataclass(eq=False)
class _Client:
    """What one key stands for."""

    session: Session
    posted: Posted = field(default_factory=Posted)
    answers: dict[str, list[_Answer]] = field(default_factory=dict)
    """By the hash of the request."""

    def repeated(self, digest: str) -> _Answer | None:
        """The answer to an equal request, those first of which nobody has received one."""
        usable = [
            answer
            for answer in self.answers.get(digest, ())
            if not answer.work.done() or not (answer.work.cancelled() or answer.work.exception())
        ]
        return min(reversed(usable), key=lambda answer: answer.delivered, default=None)

    def answered(self, response_id: object) -> _Answer:
        """The answer of an id that the gateway gave."""
        number = str(response_id).rpartition("_")[2].rpartition("-")[2]
        for answer in (each for several in self.answers.values() for each in several):
            if answer.number == number and answer.work.done():
                return answer
        raise Refused(f"{shortened(response_id)} is no answer of this episode.", 404)

    def conversation(self, response_id: str) -> list[Message]:
        """Messages up to the end of an answer, without the instructions of its request."""
        answer = self.answered(response_id)
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
            routes += [web.get(f"{base}/models", self._models), web.get(f"{base}/models/{{name:.+}}", self._models)]
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
        for answer in (each for several in client.answers.values() for each in several):
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

    async def _answer(self, endpoint: _Endpoint, request: web.Request) -> web.StreamResponse:
        """Turns for a request; the answer of an equal one where an SDK repeats it."""
        raw = await request.read()
        client, digest = self._client(request), sha256(request.path.encode() + raw).hexdigest()
        answer = None
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            client.session.counts["retries"] += 1
            answer = client.repeated(digest)
        if answer is None:
            asked = endpoint.read(read_body(raw), client.conversation)
            self._say_what_has_no_effect(client.session, asked)
            answer = _Answer(asked, asyncio.ensure_future(_turns(client.session, asked)))
            client.answers.setdefault(digest, []).append(answer)
        answer.waiting += 1
        delivered, sent = False, web.StreamResponse()
        try:
            sent = await self._send(endpoint, request, client.session, answer)
            delivered = True
        except ConnectionResetError:
            pass  # the client has hung up
        finally:
            answer.left_by_client(delivered)
        return sent

    async def _send(
        self, endpoint: _Endpoint, request: web.Request, session: Session, answer: _Answer
    ) -> web.StreamResponse:
        """Wait for the turns and write the answer."""
        sent: web.StreamResponse | None = None
        while not answer.work.done():
            await asyncio.wait([answer.work], timeout=KEEP_ALIVE)
            if answer.asked.stream and not answer.work.done():
                sent = sent or await _begin_stream(request)
                await sent.write(b": keep-alive\n\n")
        try:
            given = answer.asked, answer.turns(), session.setup.renderer, answer.number, answer.created
            whole = endpoint.whole(*given)
            lines = "".join(endpoint.lines(whole, answer.asked)) if answer.asked.stream else ""
        except Refused as refused:
            if sent is None:
                raise
            lines = f"event: error\ndata: {json.dumps(refused.error)}\n\n"
        if answer.asked.stream:
            sent = sent or await _begin_stream(request)
            await sent.write(lines.encode())
        else:
            sent = web.json_response(whole)
            await sent.prepare(request)
        await sent.write_eof()
        return sent

    def _say_what_has_no_effect(self, session: Session, asked: Asked) -> None:
        """Count sampling options of clients, and log each field without effect once."""
        overridden = asked.overridden(session.setup.params)
        session.counts["sampling_overridden"] += bool(overridden)
        for name in sorted({*overridden, *asked.body.keys() - {*READ, *ADVISORY}} - self._said):
            self._said.add(name)
            logger.warning("an agent's requests have %s, which has no effect here: the run's options decide", name)

    async def _take_reward(self, request: web.Request) -> web.Response:
        """Take a reward, of the episode or of one answer, or the word that the episode is complete."""
        body, completes = read_body(await request.read() or b"{}"), request.path.endswith("/complete")
        client = self._client(request)
        given = body.get("reward")
        named: dict[str, Any] = given if isinstance(given, dict) else {"reward": given}
        if completes and given is None:
            named = {}
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
        name = request.match_info.get("name")
        model = {"id": name or "openppo", "object": "model", "created": 0, "owned_by": "openppo"}
        return web.json_response(model if name else {"object": "list", "data": [model]})


async def _turns(session: Session, asked: Asked) -> list[Turn]:
    """The ``n`` turns that are asked for, sampled together."""
    limits: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop}
    chats = [asyncio.ensure_future(session.chat(asked.messages, asked.tools, **limits)) for _ in range(asked.n)]
    try:
        return await asyncio.gather(*chats)
    finally:
        for each in chats:
            each.cancel()  # where one of them failed


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream


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
    return web.json_response(refused.error, status=refused.status, headers={"x-should-retry": "false"})
