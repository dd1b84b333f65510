"""An OpenAI-compatible server of sessions for unmodified programs, on the event loop of their episodes."""

import asyncio
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from types import ModuleType
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from openppo import logger
from openppo.agents.gateway import chat, responses
from openppo.agents.gateway.requests import Refused, read_body, read_options
from openppo.agents.renderer import Renderer
from openppo.agents.session import EpisodeEnded, Session, SessionSetup
from openppo.agents.turn import Turn
from openppo.config.rollout import ALL_TOKENS
from openppo.datasets.templates import Message, shortened
from openppo.rewards.http_server import app_runner, body_of, serve
from openppo.rewards.server import listen
from openppo.types import Ending

_ENDPOINTS = {"chat/completions": chat, "responses": responses}
"""Modules that ``read`` a request, and make the ``whole`` answer of turns or ``lines`` of a stream."""
_SECONDS_TO_SEND = 60.0
_MOST_BYTES = 64 * 2**20
"""Bytes of the longest request, with its images."""
_BYTES_BESIDE = 4 * 2**20
"""Bytes for text in a request that the policy does not read: tools, and reasoning that templates drop."""
_BYTES_PER_CHARACTER = 6
"""Most bytes of a character in JSON."""


@dataclass(eq=False)
class _Answer:
    """The turns for one request and its repetitions by an SDK.

    ``waiting`` is the number of requests that are not answered yet. ``body`` is the request without its messages, and
    ``n`` the number of turns that it wants, which ``work`` adds to ``turns``.
    """

    digest: bytes
    body: dict[str, Any]
    n: int
    turns: list[Turn]
    work: asyncio.Task[None]
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    waiting: int = 0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Count one more request as waiting."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


@dataclass(eq=False)
class _Client:
    """State of one key, with answers by the numbers in their ids.

    ``ended`` gets the status with which a service completes ``attempt``.
    """

    session: Session
    attempt: int = 0
    ended: "asyncio.Future[str] | None" = None
    answers: dict[str, _Answer] = field(default_factory=dict)

    def repeated(self, digest: bytes) -> _Answer | None:
        """Return the last answer to an equal request, preferably one that nobody has received yet."""
        equal = [answer for answer in self.answers.values() if answer.digest == digest]
        if not equal:
            return None
        for answer in reversed(equal):
            was_received = any(turn.trained for turn in answer.turns)
            if not was_received:
                return answer
        return equal[-1]

    def answered(self, answer_id: str) -> _Answer:
        """Return the answer with an id; ``Refused`` if there is none."""
        answer = self.answers.get(answer_id.removeprefix("chatcmpl-").removeprefix("resp_"))
        if answer is None or not answer.turns:
            raise Refused(f"{shortened(answer_id)} is no answer of this episode.", 404)
        return answer

    def conversation(self, answer_id: str) -> list[Message]:
        """Messages up to the end of an answer, without the instructions of its request."""
        answer = self.answered(answer_id)
        n_instructions = 1 if answer.body.get("instructions") else 0
        return answer.turns[0].messages[n_instructions:]


class Gateway:
    """Sessions behind keys, all on the event loop of the sessions.

    A key is the bearer token of a request, or part of its path, as in ``base_url``; ``newcomer`` makes a session for an
    unknown key. ``Session.chat`` does the work: requests become its arguments, its turns become answers.
    """

    def __init__(self, port: int = 0, newcomer: Callable[[str], Session] | None = None) -> None:
        self._listener = listen("127.0.0.1", port, "--port {1}")
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._newcomer = newcomer
        self._clients: dict[str, _Client] = {}
        self._logged_options: set[str] = set()
        self._gate = asyncio.Lock()

        app = web.Application(middlewares=[_errors_as_json])
        app.router.add_get("/healthz", _health)
        for base in ("/v1", "/s/{key}/v1", "/sessions/{key}"):
            for path, endpoint in _ENDPOINTS.items():
                app.router.add_post(f"{base}/{path}", partial(self._answer, endpoint))
            app.router.add_post(f"{base}/reward", self._take_reward)
            app.router.add_post(f"{base}/complete", self._take_reward)
            app.router.add_get(f"{base}/models", self._models)
        self._runner = app_runner(app, handler_cancellation=True, shutdown_timeout=5)

    async def start(self) -> None:
        """Open the port for requests."""
        # Each request of an agent is an open file.
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

        # A pass of the event loop accepts at most ``backlog`` connections; more of them wait in the listener's queue.
        self._server = await serve(self._runner, self._listener, backlog=16)
        self._listener.listen(4096)

    async def stop(self) -> None:
        """End all requests and close the port."""
        for key in list(self._clients):
            self.close(key)
        self._server.close()
        await self._runner.cleanup()

    def open(
        self, session: Session, attempt: int = 0, ended: "asyncio.Future[str] | None" = None
    ) -> str:
        """Return a key for a session; ``ended`` gets the status with which a client completes its ``attempt``."""
        key = f"sk-{secrets.token_hex(16)}"
        self._clients[key] = _Client(session, attempt, ended)
        return key

    def base_url(self, key: str) -> str:
        """OPENAI_BASE_URL for a program; the address for rewards with ``/reward`` or ``/complete`` appended."""
        return f"{self.address}/s/{key}/v1"

    def close(self, key: str) -> None:
        """Revoke a key, and cancel its running requests."""
        for answer in self._clients.pop(key).answers.values():
            # In an empty context: an episode may only cancel its own tasks.
            Context().run(answer.work.cancel)

    def _client(self, request: web.Request) -> _Client:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("key", bearer)
        if key not in self._clients:
            if self._newcomer is None:
                raise Refused(
                    "unknown key: use OPENAI_API_KEY or OPENAI_BASE_URL of an open episode.", 401
                )
            self._clients[key] = _Client(self._newcomer(key))
        return self._clients[key]

    async def _answer(self, endpoint: ModuleType, request: web.Request) -> web.StreamResponse:
        """Answer a request with turns; a repetition by an SDK with those of the equal request."""
        raw = await _body(request, self._client(request).session.setup)
        async with self._gate:  # the event loop finishes the work of one request before the next
            await asyncio.sleep(0)

        client = self._client(request)
        digest = sha256(request.path.encode() + raw).digest()
        answer = None
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            client.session.counts["retries"] += 1
            answer = client.repeated(digest)
        if answer is None:
            body = read_body(raw)
            try:
                messages = endpoint.read(body, client.conversation)
                options = read_options(body)
            except (AttributeError, KeyError, TypeError, ValidationError) as error:
                raise Refused(f"the request does not have OpenAI's form: {error!r}.") from error
            self._count_overridden(client.session, body)

            n = body.get("n") or 1
            turns: list[Turn] = []
            work = asyncio.ensure_future(
                _sample(n, turns, client.session, messages=messages, options=options)
            )
            answer = _Answer(digest, _without_messages(body), n, turns=turns, work=work)
            client.answers[answer.number] = answer

        renderer = client.session.setup.renderer
        try:
            with answer.awaited():
                return await _send(endpoint, request, answer, renderer=renderer)
        except ConnectionResetError:  # the client has hung up
            return web.StreamResponse()
        finally:
            if answer.waiting == 0 and len(answer.turns) < answer.n:
                answer.work.cancel()
                del client.answers[answer.number]

    def _count_overridden(self, session: Session, body: dict[str, Any]) -> None:
        """Count a request with other sampling than the run's, and log each such option once."""
        params = session.setup.params
        ours = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        overridden = {name for name, value in ours.items() if body.get(name) not in (None, value)}
        if params.top_k is None and body.get("top_k") in ALL_TOKENS:
            overridden.discard("top_k")

        session.counts["sampling_overridden"] += bool(overridden)
        for name in sorted(overridden - self._logged_options):
            logger.warning(
                "an agent's requests have %s, which has no effect here: the run's options decide",
                name,
            )
        self._logged_options |= overridden

    async def _take_reward(self, request: web.Request) -> web.Response:
        """Record a reward of the episode or of one answer, or the completion of the episode."""
        self._client(request)
        body = read_body(await body_of(request))
        client = self._client(request)
        session = client.session

        completes = request.path.endswith("/complete")
        status = _status(client, body) if completes else None
        reward = body.get("reward", {} if completes else None)
        rewards: dict[str, Any] = reward if isinstance(reward, dict) else {"reward": reward}
        if not all(isinstance(value, int | float) for value in rewards.values()):
            raise Refused(
                f'reward {shortened(reward)}: send {{"reward": NUMBER}}, or numbers by name.'
            )

        answer_id = body.get("turn")
        try:
            if answer_id is None:
                session.reward_all(rewards)
            else:
                session.reward(sum(rewards.values()), client.answered(answer_id).turns[0])
        except ValueError as error:
            raise Refused(f"{error}.") from error

        if status == "completed":
            session.close(Ending.COMPLETED)
        if status is not None and client.ended is not None and not client.ended.done():
            client.ended.set_result(status)
        return web.json_response({"reward": session.rewards})

    async def _models(self, request: web.Request) -> web.Response:
        self._client(request)
        model = {"id": "openppo", "object": "model", "created": 0, "owned_by": "openppo"}
        return web.json_response({"object": "list", "data": [model]})


def _without_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request without the messages, which may be large."""
    return {name: value for name, value in body.items() if name not in ("messages", "input")}


def _status(client: _Client, body: dict[str, Any]) -> str:
    """Return the status of an ended episode, completed or failed; ``Refused`` for another attempt or status."""
    attempt = body.get("attempt", client.attempt)
    if attempt != client.attempt:
        raise Refused(
            f"attempt {shortened(attempt)} is not this one, {client.attempt}: it has been given up.",
            409,
        )
    status = body.get("status", "completed")
    if status not in ("completed", "failed"):
        raise Refused(f'status {shortened(status)}: send "completed" or "failed".')
    return str(status)


async def _sample(
    n: int, turns: list[Turn], session: Session, messages: list[Message], options: dict[str, Any]
) -> None:
    """Add ``n`` turns to ``turns``; ``Refused`` if the session samples none.

    They are not trained on until a client has them.
    """

    async def sample() -> None:
        turn = await session.chat(messages, **options)
        turn.exclude_from_training()
        turns.append(turn)

    tasks = [asyncio.ensure_future(sample()) for _ in range(n)]
    try:
        await asyncio.gather(*tasks)
    except EpisodeEnded as error:
        raise Refused(
            f"the episode has ended ({error.ending.value}): the model answers no more."
        ) from error
    except ValueError as error:
        raise Refused(str(error)) from error
    finally:
        for task in tasks:
            task.cancel()  # the others, if one failed


async def _send(
    endpoint: ModuleType, request: web.Request, answer: _Answer, renderer: Renderer
) -> web.StreamResponse:
    """Wait for the turns and write the answer; turns that a client has received are trained on."""
    await asyncio.wait([answer.work])
    if answer.work.cancelled():
        raise Refused("the episode has ended.")
    answer.work.result()

    whole = endpoint.whole(
        answer.body, answer.turns, renderer, number=answer.number, created=answer.created
    )
    if answer.body.get("stream"):
        text = "".join(endpoint.lines(whole, answer.body))
        response = web.Response(text=text, content_type="text/event-stream")
    else:
        response = web.json_response(whole)

    try:
        async with asyncio.timeout(_SECONDS_TO_SEND):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read its answer") from error

    for turn in answer.turns:
        turn.include_in_training()
    return response


async def _body(request: web.Request, setup: SessionSetup) -> bytes:
    """Read the body of a request; ``Refused`` if it is too long."""
    most = most_bytes(setup)
    try:
        return await body_of(request, most)
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the request has over {most / 2**20:.3g} MiB, and the policy reads {setup.most} tokens: send less."
        raise Refused(message, error.status) from error


def most_bytes(setup: SessionSetup) -> int:
    """Bytes of the longest request: one that fills the context with the longest tokens, or has images."""
    renderer = setup.renderer
    if renderer.bound is None or renderer.vision is not None:
        return _MOST_BYTES
    most_characters = renderer.bound.longest * setup.most
    return min(_MOST_BYTES, _BYTES_BESIDE + _BYTES_PER_CHARACTER * most_characters)


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPException as error:
        refused = Refused(
            f"{request.method} {request.path}: {error.text or error.reason}", error.status
        )
    return web.json_response(
        refused.json, status=refused.status, headers={"x-should-retry": "false"}
    )
