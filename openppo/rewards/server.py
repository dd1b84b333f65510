"""A reward model behind HTTP, in the JSON that ``rewards/http.py`` and OpenRLHF's clients speak."""

import asyncio
import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import ServeRMConfig
from openppo.datasets.templates import encode_start
from openppo.model_inputs import ModelInputs
from openppo.models.loading import attention_implementation, model_error_context
from openppo.models.pretrained import (
    check_model,
    check_token_ids,
    context_length,
    load_tokenizer,
    pad_token_id,
)
from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.models.vision_models import placeholders
from openppo.rewards.build import stored_normalization
from openppo.rewards.http import read_token
from openppo.rewards.http_server import app_runner, body_of, serve
from openppo.rewards.model import forward_scores
from openppo.strategy.comm import set_up_gpu
from openppo.strategy.fused_kernels import fuse_kernels, has_kernels
from openppo.types import SingleProcess


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


def build_server(options: ServeRMConfig) -> RewardServer:
    """Load the reward model and open the port; ``ValueError`` names the flag to change."""
    flag = "--reward_pretrain"
    name = options.reward_pretrain
    where = f"{flag} {name}"
    trust = options.trust_remote_code

    set_up_gpu(options.bf16)
    token = None if options.token_file is None else read_token(options.token_file, "--token_file")
    listener = listen(options.host, options.port)
    attention_implementation(options.flash_attn, options.bf16)

    model_config = check_model(name, flag, trust)
    tokenizer = load_tokenizer(name, flag, trust_remote_code=trust)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{where}: its tokenizer has no EOS token, at which a text is scored.")
    check_token_ids(model_config, where, tokenizer, rows=[[tokenizer.eos_token_id]])

    max_len = min(options.max_len, context_length(model_config) or options.max_len)
    if max_len < options.max_len:
        logger.warning(
            "%s %s: --max_len %d is cut to its context, %d tokens",
            flag,
            name,
            options.max_len,
            max_len,
        )
    mean, std = 0.0, 1.0
    if options.normalize_reward:
        mean, std = stored_normalization(model_config, where)

    loading = {"bf16": options.bf16, "flash_attn": options.flash_attn, "trust_remote_code": trust}
    with model_error_context(flag, name):
        model = get_llm_for_sequence_regression(
            name, "reward", value_head_prefix=options.value_head_prefix, **loading
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.eval().to(device)
    if options.fused_kernels == "auto" and has_kernels(device, SingleProcess()):
        fuse_kernels(model, device, SingleProcess())

    def encode(text: str) -> list[int]:
        ids = encode_conversation(tokenizer, text, max_len)
        if not placeholders(model_config).keys().isdisjoint(ids):
            raise ValueError(
                "serve_rm reads no images, and a text names the token of one: use --reward_pretrain."
            )
        check_token_ids(model_config, "the reward model", tokenizer, rows=[ids])
        return ids

    pad = pad_token_id(tokenizer)

    def score(rows: list[list[int]]) -> list[float]:
        outputs = forward_scores(model, ModelInputs.of_ids(rows, pad).to(device))
        return [(output - mean) / std for output in outputs]

    return RewardServer(score=score, encode=encode, listener=listener, config=options, token=token)


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


def encode_conversation(tokenizer: PreTrainedTokenizerBase, text: str, max_len: int) -> list[int]:
    """Token ids of a text that holds a whole conversation, as OpenRLHF's server reads it.

    They end with one EOS. PAD around the text is dropped; a BOS comes first if the tokenizer puts one there. Only the
    last ``max_len`` ids are kept.
    """
    pad = tokenizer.pad_token
    eos = tokenizer.eos_token
    start = 0
    while pad and text.startswith(pad, start):
        start += len(pad)
    end = _end_without(text, [token for token in (pad, eos) if token], start)
    ids = [*encode_start(tokenizer, text[start:end]), tokenizer.eos_token_id]
    return ids[-max_len:]


def _end_without(text: str, tokens: Sequence[str], start: int) -> int:
    """Place in ``text`` where the ``tokens`` at its end, and blanks among them, begin; takes linear time."""
    end = last = len(text)
    while True:
        while last > start and text[last - 1].isspace():
            last -= 1
        endings = [token for token in tokens if text.endswith(token, start, last)]
        if not endings:
            return end
        end = last = last - len(endings[0])


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
