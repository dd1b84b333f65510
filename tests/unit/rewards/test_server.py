"""The reward server: whose texts share a forward, and what happens to failures."""

import asyncio
import logging
import signal
import threading

import aiohttp

from openppo.config import ServeRMConfig
from openppo.rewards.server import RewardServer, listen


class Lengths:
    """Scores rows by their length; a forward waits until it is let go."""

    def __init__(self):
        self.batches: list[list[list[int]]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, rows):
        self.batches.append(rows)
        assert self.go_on.wait(60)
        if [13] in rows:
            raise MemoryError("CUDA out of memory")
        return [float(len(row)) for row in rows]


def serve(use, score, token=None, **options):
    """Serve on this thread, with an ``encode`` that gives one id per character, until ``use`` is done."""
    listener, config = listen("127.0.0.1", 0), ServeRMConfig("my/model", port=0, **options)
    server = RewardServer(score, lambda text: [ord(c) for c in text], listener, config, token)

    async def client():
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession(base) as session:
            async with session.get(
                "/health"
            ) as answer:  # it answers, so it also listens to signals
                known = {"model": "my/model"} if token is None else {}
                assert await answer.json() == {"status": "ok", **known}
            try:
                await use(session, server)
            finally:
                signal.raise_signal(signal.SIGTERM)

    async def both():
        await asyncio.gather(server._serve(), client())

    asyncio.run(asyncio.wait_for(both(), 120))
    server.close()


async def post(session, body, path="/get_reward", **headers):
    """Status and JSON of the answer."""
    data = {"json": body} if not isinstance(body, bytes) else {"data": body}
    async with session.post(path, headers=headers, **data) as answer:
        return answer.status, await answer.json()


async def until(condition):
    """Wait for what another thread does."""
    while not condition():
        await asyncio.sleep(0.005)


def test_texts_of_all_clients_share_forwards_and_are_answered_before_the_end():
    score = Lengths()

    async def use(session, server):
        score.go_on.clear()
        first = asyncio.create_task(post(session, {"query": ["a"]}))
        await until(lambda: len(score.batches) == 1)  # the others wait behind it
        sizes = (2, "/"), (1, "/get_reward"), (4, "/")
        bodies = [({"query": ["bb"] * n, "prompts": ["x"] * n}, path) for n, path in sizes]
        others = [asyncio.create_task(post(session, *body)) for body in bodies]
        await until(lambda: server._waiting.qsize() == 7)
        gone = asyncio.create_task(post(session, {"query": ["gone"]}))
        await until(lambda: server._waiting.qsize() == 8)
        gone.cancel()
        await until(lambda: server._waiting._queue[-1][1].cancelled())
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        score.go_on.set()
        assert await first == (200, {"rewards": [1.0]})
        assert [len(answer[1]["rewards"]) for answer in await asyncio.gather(*others)] == [2, 1, 4]

    serve(use, score, max_batch_size=3)
    assert [len(batch) for batch in score.batches] == [1, 3, 3, 1], (
        "not that of the client that has gone"
    )


def test_a_forward_that_fails_fails_its_requests_only(caplog):
    caplog.set_level(logging.ERROR, "openppo")

    async def use(session, server):
        status, answer = await post(session, {"query": ["\r"]})
        assert (status, answer["error"]) == (
            500,
            "the reward model failed: MemoryError('CUDA out of memory')",
        )
        assert await post(session, {"query": ["abc", ""]}) == (200, {"rewards": [3.0, 0.0]})
        async with session.get("/nowhere") as missing:
            assert (missing.status, await missing.json()) == (404, {"error": "404: Not Found"})

    serve(use, Lengths())
    assert "out of memory" in caplog.text


def test_a_bad_request_is_told_why():
    bad = [
        b"{",
        b"\xff",
        b"[" * 100_000,
        [],
        "a",
        {"prompts": ["a"]},
        {"query": "a"},
        {"query": ["a", 1]},
    ]

    async def use(session, server):
        for body in [*bad, {"query": ["a", "\ud83d"]}]:
            status, answer = await post(session, body)
            assert (status, answer["error"][:48]) == (
                400,
                'the request must be JSON, {"query": [texts]}; "p',
            )
        status, answer = await post(session, {"query": ["a" * 200_000]})
        remedy = "send fewer texts, or raise --max_request_mb of the server"
        assert (status, answer["error"]) == (413, f"the request has over 0.1 MiB: {remedy}")
        assert await post(session, {"query": []}) == (200, {"rewards": []})

    serve(use, Lengths(), max_request_mb=0.1)


def test_the_server_answers_while_a_text_is_encoded():
    begun, go_on = threading.Event(), threading.Event()

    def encode(text):
        begun.set()
        assert go_on.wait(20), "nothing else was answered meanwhile"
        return [1, 2]

    async def use(session, server):
        server.encode = encode
        request = asyncio.create_task(post(session, {"query": ["a long text"]}))
        await until(begun.is_set)
        async with session.get("/health") as answer:
            assert answer.status == 200
        go_on.set()
        assert await request == (200, {"rewards": [2.0]})

    serve(use, Lengths())


def test_a_token_is_asked_for():
    async def use(session, server):
        for sent in (None, "Bearer", "Bearer sesam", "sesame", "Bearer ñ"):
            headers = {} if sent is None else {"Authorization": sent}
            status, answer = await post(session, {"query": ["a"]}, **headers)
            assert status == 401
            assert "Authorization: Bearer TOKEN" in answer["error"]
        assert (await post(session, {"query": ["a" * 200_000]}))[0] == 401, (
            "before it is read: not 413"
        )
        assert await post(session, {"query": ["a"]}, Authorization="Bearer sesame") == (
            200,
            {"rewards": [1.0]},
        )

    serve(use, Lengths(), token="sesame", max_request_mb=0.1)
