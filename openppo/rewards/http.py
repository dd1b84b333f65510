"""Scores from reward servers over HTTP, in the JSON that OpenRLHF's servers use.

A request is POST {"query": [...], "prompts": [...], "labels": [...]}, its answer {"rewards": [...]}. ``query`` is the
text of all tokens of a sample, special ones included.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from transformers import PreTrainedTokenizerBase

from openppo.config import RewardConfig, mask_credentials
from openppo.rewards.function import make_samples
from openppo.rewards.scoring import check_scores, shortened
from openppo.types import Score, Trajectory

logger = logging.getLogger("openppo")
T = TypeVar("T")

_REQUESTS_PER_SERVER = 4
_SECONDS_TO_CONNECT = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_LONGEST_QUOTE = 200
_MOST_BYTES_OF_AN_ANSWER = 16 * 2**20
_MAY_PASS = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which the same request may succeed."""
_REFUSED = "refuses the token (HTTP status {}). Give the right one with --remote_rm_token_file."
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class RemoteScorer:
    """Rewards named ``name`` from the servers of ``source.remote_rm_url``.

    Requests of ``remote_rm_batch_size`` samples go to the server with the fewest failures, and among equals with the
    fewest requests under way. A request without a response is retried ``remote_rm_retries`` times, after pauses that
    double: seven of them last 61 to 123 s, so that a server may be started again. A wrong answer ends the run at once:
    it would be wrong again.
    """

    collective = False

    def __init__(self, source: RewardConfig, tokenizer: PreTrainedTokenizerBase, name: str = "reward") -> None:
        assert source.remote_rm_url is not None, "validated before"
        self.urls = _split_urls(source.remote_rm_url)
        self.headers = _headers(source.remote_rm_token_file)
        both = next((url for url in self.urls if self.headers and "@" in urlsplit(url).netloc), None)
        if both is not None:
            raise ValueError(
                f"{self._at(both)}: this address has a user, and --remote_rm_token_file a token; a request can carry "
                "only one of them. Leave one out."
            )
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = source.remote_rm_batch_size
        self.retries = source.remote_rm_retries
        self.timeout = source.remote_rm_timeout
        self.n_scored = 0

    def __str__(self) -> str:
        return "--remote_rm_url"

    def _at(self, url: str) -> str:
        """What messages call a server."""
        return f"{self} {mask_credentials(url)}"

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory. ``ConnectionError`` names the server that gave no answer, and its last failure.

        ``ValueError`` names the server that refused a request or gave a wrong answer, and what came.
        """
        self.n_scored = 0
        starts = range(0, len(trajectories), self.batch_size)
        rewards = _run(self._score_all([trajectories[i : i + self.batch_size] for i in starts]))
        return [Score({self.name: reward}) for batch in rewards for reward in batch]

    def check(self) -> None:
        """``ValueError`` for a server that cannot be reached or refuses the token; any other response is accepted."""
        _run(self._check_all())

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=_SECONDS_TO_CONNECT)
        return aiohttp.ClientSession(headers=self.headers, timeout=timeout, json_serialize=_as_json)

    async def _check_all(self) -> None:
        async with self._session() as session:
            for url in self.urls:
                try:
                    async with session.get(url, allow_redirects=False) as answer:
                        status = answer.status
                except _FAILURES as error:
                    raise ValueError(
                        f"{self._at(url)}: no reward server answers there ({_cause(error, self.timeout)}). Start it "
                        "first, or check the address."
                    ) from error
                if status in (401, 403):
                    raise ValueError(f"{self._at(url)}: {_REFUSED.format(status)}")

    async def _score_all(self, batches: Sequence[Sequence[Trajectory]]) -> list[list[float]]:
        load = _Load(self.urls)
        async with self._session() as session:
            return await asyncio.gather(*(self._score_batch(session, load, batch) for batch in batches))

    async def _score_batch(
        self, session: aiohttp.ClientSession, load: _Load, batch: Sequence[Trajectory]
    ) -> list[float]:
        samples = make_samples(batch, self.tokenizer)
        data = {
            "query": [sample.own["query"] for sample in samples],
            "prompts": [sample.own["prompt"] for sample in samples],
            "labels": [sample.own["label"] for sample in samples],
        }
        for attempt in range(1 + self.retries):
            if attempt > 0:
                await asyncio.sleep(load.pause(attempt))
            try:
                async with load.server() as url:
                    rewards = self._read(url, await self._post(session, url, data), batch)
                    self.n_scored += len(batch)
                    return rewards
            except _FAILURES as error:
                cause = _cause(error, self.timeout)
                load.failures[url] += 1
                if (url, attempt) not in load.told:  # once, not for each of a thousand requests
                    load.told.add((url, attempt))
                    attempts = f"attempt {attempt + 1} of {1 + self.retries}"
                    logger.warning("%s: %s (%s)", self._at(url), cause, attempts)
                failure = error
        raise ConnectionError(
            f"{self._at(url)}: no answer after {1 + self.retries} attempts; the last failure: {cause}. Look at the "
            "server; --remote_rm_retries and --remote_rm_timeout give it more time."
        ) from failure

    async def _post(self, session: aiohttp.ClientSession, url: str, data: dict[str, list[Any]]) -> str:
        """The body of a good answer; ``ConnectionError`` for a status that may pass, ``ValueError`` for another."""
        async with session.post(url, json=data, allow_redirects=False) as answer:
            body = await self._body(url, answer)
        if answer.status in _MAY_PASS:
            raise ConnectionError(f"HTTP status {answer.status}, {shortened(body)}")
        if answer.status in (401, 403):
            raise ValueError(f"{self._at(url)}: {_REFUSED.format(answer.status)}")
        if answer.status != 200:
            raise ValueError(
                f"{self._at(url)}: answered with HTTP status {answer.status}, {shortened(body)}. Check the path."
            )
        if _may_be_cut(answer, body):
            raise ConnectionError(f"the answer {shortened(body)} breaks off")
        return body

    async def _body(self, url: str, answer: aiohttp.ClientResponse) -> str:
        """The answer's text; ``ValueError`` if it is larger than any good one, without reading on."""
        body = bytearray()
        async for part in answer.content.iter_any():
            body += part
            if len(body) > _MOST_BYTES_OF_AN_ANSWER:
                raise ValueError(
                    f"{self._at(url)}: answered with more than {_MOST_BYTES_OF_AN_ANSWER // 2**20} MiB: "
                    f"{shortened(body[:_LONGEST_QUOTE].decode(errors='replace'))}"
                )
        return body.decode(errors="replace")

    def _read(self, url: str, body: str, batch: Sequence[Trajectory]) -> list[float]:
        """The rewards of an answer; ``ValueError`` naming the server and what came for anything else."""
        try:
            rewards = json.loads(body)["rewards"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            rewards = None
        if not isinstance(rewards, list):
            raise ValueError(f'{self._at(url)}: answered {shortened(body)} where {{"rewards": [numbers]}} is needed.')
        return check_scores(rewards, batch, self._at(url))


def _may_be_cut(answer: aiohttp.ClientResponse, body: str) -> bool:
    """Whether JSON has no end, in an answer that ends with its connection: nothing else would tell that it was cut."""
    if "Content-Length" in answer.headers or "Transfer-Encoding" in answer.headers:
        return False
    try:
        json.loads(body)
    except ValueError:
        return body.lstrip()[:1] in ("", "{", "[")
    return False


class _Load:
    """What one round of scoring knows of its servers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.failures: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.told: set[tuple[str, int]] = set()
        """Failures that the log has: servers and numbers of attempts."""
        self._places = asyncio.Semaphore(_REQUESTS_PER_SERVER * len(urls))
        self._random = random.Random()  # not the run's own numbers

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """The server for a request that is sent inside."""
        async with self._places:
            url = min(self.urls, key=lambda url: (self.failures[url], self.under_way[url]))
            self.under_way[url] += 1
            try:
                yield url
            finally:
                self.under_way[url] -= 1

    def pause(self, attempt: int) -> float:
        """Seconds before the ``attempt``-th repetition: doubling, and not the same for all requests."""
        longest = min(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
        return longest * self._random.uniform(0.5, 1.0)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, run on a thread of its own: this one may have an event loop, as notebooks do."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _split_urls(urls: str) -> list[str]:
    split = [url.strip() for url in urls.split(",")]
    for url in split:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # brackets that are no IPv6 address
            good = False
        if not good:
            raise ValueError(
                f"--remote_rm_url {mask_credentials(url)!r}: give http://HOST:PORT/PATH, several with commas, or one "
                "Python file path.py."
            )
    return split


def _headers(token_file: str | None) -> dict[str, str]:
    if token_file is None:
        return {}
    return {"Authorization": f"Bearer {read_token(token_file, '--remote_rm_token_file')}"}


def read_token(file: str, flag: str) -> str:
    """The token in ``file``; ``ValueError`` naming ``flag`` if there is none."""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error}). Check the path.") from error
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(f"{flag} {file}: it must hold one line, the token, of plain characters.")
    return token


def _cause(error: BaseException, seconds: float) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {seconds:g} s" if not str(error) else mask_credentials(str(error))
    return mask_credentials(f"{type(error).__name__}: {error}")


def _as_json(data: Any) -> str:
    """Labels that JSON does not know, such as dates of a Parquet file, go as their text."""
    return json.dumps(data, default=str)
