"""Scores from reward servers over HTTP, in the JSON that OpenRLHF's servers use.

A request is POST {"query": [...], "prompts": [...], "labels": [...]}, its answer {"rewards": [...]}. ``query`` is the
text of all tokens of a sample, special ones included.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RewardConfig, mask_credentials
from openppo.datasets.templates import shortened
from openppo.rewards.function_values import values_of
from openppo.rewards.scoring import check_scores
from openppo.types import Sample, Score

T = TypeVar("T")

_REQUESTS_PER_SERVER = 4
_SECONDS_TO_CONNECT = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which the same request may succeed."""
_REFUSED = "refuses the token (HTTP status {}). Give the right one with --remote_rm_token_file."
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_VALUE_NAMES = {"query": "query", "prompts": "prompt", "labels": "label"}
"""Key of a request -> name of its values in ``function_values.Values``."""


class RemoteScorer:
    """Rewards named ``name`` from the servers of ``rewards.remote_rm_url``.

    A request of ``remote_rm_batch_size`` samples goes to the server with the fewest failures, then the fewest requests
    under way. A request without a response is retried ``remote_rm_retries`` times, after pauses that double: seven
    pauses last 61 to 123 s, long enough to restart a server. A wrong answer ends the run at once, since it would be
    wrong again.
    """

    collective = False

    def __init__(
        self, rewards: RewardConfig, tokenizer: PreTrainedTokenizerBase, name: str = "reward"
    ) -> None:
        assert rewards.remote_rm_url is not None, "validated before"
        self.urls = [url.strip() for url in rewards.remote_rm_url.split(",")]
        for url in self.urls:
            if not re.match("https?://[^/]", url):
                raise ValueError(
                    f"{_named(url)}: give http://HOST:PORT/PATH, several with commas, or one Python file path.py."
                )
        self.headers: dict[str, str] = {}
        if rewards.remote_rm_token_file is not None:
            token = read_token(rewards.remote_rm_token_file, "--remote_rm_token_file")
            self.headers = {"Authorization": f"Bearer {token}"}
        self.tokenizer = tokenizer
        self.name = name
        self.batch_size = rewards.remote_rm_batch_size
        self.retries = rewards.remote_rm_retries
        self.timeout = rewards.remote_rm_timeout

    def __str__(self) -> str:
        return "--remote_rm_url"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample.

        ``ConnectionError`` names the server that gave no answer, and its last failure. ``ValueError`` names the server
        that refused a request or gave a wrong answer, and quotes the answer.
        """
        starts = range(0, len(samples), self.batch_size)
        batches = [samples[i : i + self.batch_size] for i in starts]
        rewards = _run(self._score_all(batches))
        return [Score({self.name: reward}) for batch in rewards for reward in batch]

    def check(self) -> None:
        """Raise ``ValueError`` for a server that cannot be reached or refuses the token.

        Any other response is accepted.
        """
        _run(self._check_all())

    def _session(self) -> aiohttp.ClientSession:
        """Session with the token and the time limit."""
        timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=_SECONDS_TO_CONNECT)
        # Labels of types that JSON lacks, such as dates, become text.
        as_json = partial(json.dumps, default=str)
        return aiohttp.ClientSession(headers=self.headers, timeout=timeout, json_serialize=as_json)

    async def _check_all(self) -> None:
        """Request the status of each server."""
        # ValueError comes from an address with a user when there is a token too.
        failures = (*_FAILURES, ValueError)
        async with self._session() as session:
            for url in self.urls:
                try:
                    async with session.get(url, allow_redirects=False) as answer:
                        status = answer.status
                except failures as error:
                    raise ValueError(
                        f"{_named(url)}: no reward server answers there ({_cause(error, self.timeout)}). Start it "
                        "first, or check the address."
                    ) from error
                if status in (401, 403):
                    raise ValueError(f"{_named(url)}: {_REFUSED.format(status)}")

    async def _score_all(self, batches: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Rewards of all batches, several of which are requested at the same time."""
        load = _Load(_REQUESTS_PER_SERVER * len(self.urls))
        async with self._session() as session:
            work = [self._score_batch(session, load, batch) for batch in batches]
            return await asyncio.gather(*work)

    async def _score_batch(
        self, session: aiohttp.ClientSession, load: _Load, batch: Sequence[Sample]
    ) -> list[float]:
        """Rewards of one batch; ``ConnectionError`` if no attempt gets an answer."""
        values = [values_of(sample, self.tokenizer) for sample in batch]
        data: dict[str, list[Any]] = {}
        for key, name in _VALUE_NAMES.items():
            data[key] = [sample_values[name] for sample_values in values]

        for attempt in range(1 + self.retries):
            if attempt > 0:
                await asyncio.sleep(_pause(attempt))
            async with load.places:
                url = min(self.urls, key=load.priority)
                load.under_way[url] += 1
                try:
                    body = await _post(session, url, data)
                    return _read(url, body, batch)
                except _FAILURES as error:
                    failure = error
                    cause = _cause(error, self.timeout)
                finally:
                    load.under_way[url] -= 1

            if load.failures[url] == 0:  # once, not for each of a thousand requests
                logger.warning("%s: %s; repeated up to %d times", _named(url), cause, self.retries)
            load.failures[url] += 1

        raise ConnectionError(
            f"{_named(url)}: no answer after {1 + self.retries} attempts; the last failure: {cause}. Look at the "
            "server; remote_rm_retries and remote_rm_timeout give it more time."
        ) from failure


class _Load:
    """State of the servers in one round of scoring."""

    def __init__(self, n_places: int) -> None:
        self.places = asyncio.Semaphore(n_places)
        self.failures = Counter[str]()
        self.under_way = Counter[str]()

    def priority(self, url: str) -> tuple[int, int]:
        """Failures and requests under way of a server; the server with the least gets the next request."""
        return self.failures[url], self.under_way[url]


def _pause(attempt: int) -> float:
    """Seconds before the ``attempt``-th repetition: doubling, and different for each request."""
    longest = min(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
    # The random numbers of the run must not change.
    return longest * random.SystemRandom().uniform(0.5, 1.0)


async def _post(session: aiohttp.ClientSession, url: str, data: dict[str, list[Any]]) -> str:
    """Body of an answer with status 200; ``ConnectionError`` for a transient status, ``ValueError`` for another."""
    async with session.post(url, json=data, allow_redirects=False) as answer:
        body = await answer.text(errors="replace")
        status = answer.status

    if status in _TRANSIENT:
        raise ConnectionError(f"HTTP status {status}, {shortened(body)}")
    if status in (401, 403):
        raise ValueError(f"{_named(url)}: {_REFUSED.format(status)}")
    if status != 200:
        raise ValueError(
            f"{_named(url)}: answered with HTTP status {status}, {shortened(body)}. Check the path."
        )
    return body


def _read(url: str, body: str, batch: Sequence[Sample]) -> list[float]:
    """Read the rewards of an answer; ``ValueError`` names the server and quotes any other answer."""
    try:
        rewards = json.loads(body)["rewards"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        rewards = None
    if not isinstance(rewards, list):
        raise ValueError(
            f'{_named(url)}: answered {shortened(body)} where {{"rewards": [numbers]}} is needed.'
        )
    return check_scores(rewards, batch, _named(url))


def _named(url: str) -> str:
    """Name of a server in messages, without its secrets."""
    return f"--remote_rm_url {mask_credentials(url)}"


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a thread of its own, since this thread may have an event loop, as in notebooks."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def read_token(file: str, flag: str) -> str:
    """Read the token in ``file``; ``ValueError`` naming ``flag`` if there is none."""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error}). Check the path.") from error
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(f"{flag} {file}: it must hold one line, the token, of plain characters.")
    return token


def _cause(error: BaseException, seconds: float) -> str:
    """Text of a failure, without secrets; ``seconds`` is the time limit."""
    if isinstance(error, asyncio.TimeoutError):
        return mask_credentials(str(error)) or f"no answer within {seconds:g} s"
    return mask_credentials(f"{type(error).__name__}: {error}")
