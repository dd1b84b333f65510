"""Agents that are services: programs that play episodes by themselves."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp

from openppo.agents.episodes import Agent
from openppo.agents.gateway.server import Gateway
from openppo.agents.program import row_json
from openppo.agents.session import Session
from openppo.config.fields import mask_credentials
from openppo.types import EpisodeInput, Prompt

_SECONDS_TO_ACCEPT = 30.0
_SECONDS_BETWEEN_TRIES = 0.5


class ServiceError(Exception):
    """A service that refused an episode or reported its failure."""


class ServiceAgent(Agent):
    """Agent whose episodes a program plays, one for each ``POST url/run``.

    It has the model at ``base_url``. It answers 202 at once, and ends the episode with ``POST {base_url}/complete``:
    ``{"reward": ..., "attempt": ...}``, or ``{"status": "failed"}``. Its later requests have no effect, nor have those
    after the time limit, since its key is revoked.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._attempts = count(1)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``ValueError`` if nothing answers at the address."""
        try:
            urlopen(self.url, timeout=_SECONDS_TO_ACCEPT).close()
        except HTTPError:
            return  # a service without such a page has answered
        except OSError as error:
            raise ValueError(
                f"{self._name} does not answer ({error}): start it before the run."
            ) from error

    async def start(self) -> None:
        """Start the gateway on a free port."""
        self.gateway = Gateway()
        await self.gateway.start()
        limit = aiohttp.ClientTimeout(total=_SECONDS_TO_ACCEPT)
        self._http = aiohttp.ClientSession(timeout=limit, json_serialize=row_json)

    async def stop(self) -> None:
        """Stop the gateway."""
        await self._http.close()
        await self.gateway.stop()

    async def run(self, task: EpisodeInput, session: Session) -> float | Mapping[str, float] | None:
        """Hand the episode over and wait for its end."""
        attempt = next(self._attempts)
        ended = asyncio.get_running_loop().create_future()
        key = self.gateway.open(session, attempt, ended)
        try:
            await self._hand_over(self._message(task, key, attempt))
            status = await ended
        finally:
            self.gateway.close(key)
        if status != "completed":
            raise ServiceError(f"{self._name} says that the episode {status}")
        return None

    async def _hand_over(self, body: dict[str, Any]) -> None:
        """Try until the service accepts the episode: one that was killed may be starting again."""
        while True:
            with suppress(aiohttp.ClientConnectorError):  # the service has not received it
                async with self._http.post(f"{self.url}/run", json=body) as answer:
                    if answer.status == 202:
                        return
                    text = (await answer.text())[:200]
                    raise ServiceError(f"{self._name} answered {answer.status}, not 202: {text}")
            await asyncio.sleep(_SECONDS_BETWEEN_TRIES)

    def _message(self, task: EpisodeInput, key: str, attempt: int) -> dict[str, Any]:
        return {
            "episode": f"{task.group}-{secrets.token_hex(4)}",
            "attempt": attempt,
            "group": task.group,
            "seed": task.seed,
            "row": task.prompt.row,
            "messages": task.messages,
            "base_url": self.gateway.base_url(key),
            "api_key": key,
        }

    @property
    def _name(self) -> str:
        return f"the service {mask_credentials(self.url)}"
