"""Generation with the actor's own Hugging Face module, whose weights are read in place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openppo import logger
from openppo.media import TokenIds, Tokens, distinct_ids
from openppo.models.attention import LengthsError
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.models.size import check_cache
from openppo.rollout.decode_graphs import CannotRecordError, DecodeGraphs, Recorder, check_layers
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.memory import free_memory
from openppo.rollout.prefill import padded_left, prefill_tokens, whole_images
from openppo.rollout.request_queue import Queue
from openppo.rollout.requests import Request, longest
from openppo.rollout.row_cache import RowCache
from openppo.rollout.sampling import Decode, request_uniforms
from openppo.types import Completion, FinishReason, SamplingParams

ROWS_ON_CPU = 64
ROWS_ON_GPU = 256


class HFEngine(Engine):
    """``Engine`` that decodes with a causal language model from transformers.

    Up to ``max_batch_size`` requests are decoded together (None: 64 on a CPU; on a GPU 256, or fewer if memory for them
    is short when decoding begins). Waiting requests take over the rows of ended ones; equal prompts are read once. A
    response ends with a sampled id in ``eos_token_ids`` and includes it. ``pad_token_id`` only fills unused places.
    Pass ``any_rank`` if partitioned weights cannot be gathered; without it, ``new_recorder`` can record decode steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_size: int | None = None,
        any_rank: Callable[[bool], bool] | None = None,
        sampled_ids: SampledIds = ALL_IDS,
        decode: Decode | None = None,
        new_recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        super().__init__(any_rank, sampled_ids, decode)
        check_cache(model.config)
        if new_recorder is not None:
            check_layers(model.config)
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_size = max_batch_size or _default_rows(self._device)
        self.new_recorder = new_recorder
        self._sizes_itself = max_batch_size is None
        self._waiting = Queue()
        self._running: list[Request] = []  # in the order of the cache's rows
        self._cache: RowCache | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(
        self,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
    ) -> int:
        """Queue a request and return its number."""
        if not prompt.token_ids:
            raise ValueError("a prompt needs at least one token")
        uniforms = request_uniforms(seed, params.max_new_tokens)
        request = Request(
            next(self._numbers),
            tuple(distinct_ids(prompt)),
            params,
            uniforms=uniforms,
            park=park,
            continue_from=continue_from,
            media=prompt.media,
        )
        self._waiting.append(request)
        if self._cache is not None:
            self._cache.fit(longest([request]))
        return request.number

    def cancel(self, number: int) -> None:
        """Drop a request and free its row; no effect if it has ended."""
        self._waiting[:] = [request for request in self._waiting if request.number != number]
        rows = [row for row, request in enumerate(self._running) if request.number == number]
        self._free_rows(rows)

    def partial(self, number: int) -> Completion:
        """Return what a request that has not ended has sampled so far, as an aborted completion."""
        for request in self._running:
            if request.number == number:
                return request.completion(FinishReason.ABORT, None)
        return Completion([], [], [], finish_reason=FinishReason.ABORT)

    @torch.no_grad()  # inference_mode would mark the weights that ZeRO-3 gathers inside
    def step(self) -> None:
        """Run one forward: prefill waiting prompts, decode one token per row, or idle in lockstep."""
        if self._cache is not None and self._cache.version != self.version:
            self._reread_rows()

        entering = self._admit()
        if entering:
            self._prefill(entering)
        elif self._running:
            self._decode()
        else:
            ids = torch.tensor([[self.pad_token_id]], device=self._device)
            self.model(input_ids=ids, use_cache=False)

        is_idle = not self.busy and self._graphs is None
        if is_idle and self._cache is not None and not self._cache.prefixes:
            self._cache = None

    @contextmanager
    def with_weights(self, weights: WeightSource) -> Iterator[None]:
        """Gather weights that ZeRO-3 partitions, unless ranks decode in lockstep."""
        with (
            weights.gathered(in_lockstep=self.any_rank is not None),
            _without_flash_attention(self.model),
        ):
            self._reread_rows()  # graphs are dropped if weights have moved
            try:
                yield
            finally:
                self._reread_rows()  # weights may change afterwards

        if self._graphs is not None:
            keeps_graphs = self._graphs.still_fit() and self._graphs.cache.is_small()
            if not keeps_graphs:
                self._cache = self._graphs = None  # other work needs the memory
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # cached blocks of the buffers' sizes fit no other shapes

    def order(self, prompts: Sequence[Tokens]) -> Sequence[int]:
        """Return the indexes of prompts, longest first."""
        return sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids), reverse=True)

    def stop_recording(self) -> None:
        """Launch further decode steps one by one."""
        self.new_recorder = self._graphs = None

    def _reread_rows(self) -> None:
        """Drop all keys and values; the next prefill reads running rows again."""
        self._accept(late=0)
        self._waiting[:0] = self._running
        self._running = []
        if self._graphs is not None and self._graphs.still_fit():
            # Only the contents are outdated: graphs replay on the same buffers.
            self._graphs.cache.clear(self.version)
        else:
            self._cache = self._graphs = None

    def _admit(self) -> list[Request]:
        """Pop the waiting requests to prefill next; none if too few rows are free."""
        if self._cache is None:
            if not self._waiting:
                return []
            self._cache = _new_cache(self)
            self._cache.fit(longest(self._waiting))

        max_tokens = prefill_tokens(self._device.type == "cpu")
        return self._waiting.take(
            len(self._running), self._cache.max_rows, self._cache.prefixes.n_kept, most=max_tokens
        )

    def _prefill(self, requests: list[Request]) -> None:
        """Run one forward over the unread tokens of ``requests``, and sample a token for each."""
        cache = self._cache
        assert cache is not None
        all_requests = [*self._running, *requests, *self._waiting]
        if cache.reserve(len(all_requests), longest(all_requests)):
            self._graphs = None
        self.read_tokens += sum(len(request.known_ids) for request in requests)
        self.reused_tokens += sum(request.n_kept for request in requests)

        # Equal prompts are read once.
        states = cache.prefixes.states(requests)
        known_ids = list(states)
        media_of = {request.known_ids: request.media for request in requests}
        prompts = [TokenIds(ids, media_of[ids]) for ids in known_ids]
        n_unread = max(request.n_unread for request in requests)
        width = whole_images(self.model, prompts, n_unread)

        inputs = cache.begin(list(map(len, known_ids)), width, list(states.values()))
        ids, shifts = padded_left(self.model, prompts, width, inputs=inputs)
        logits = cache.logits(self.model, ids, inputs)  # (prompts, V)

        rows = [known_ids.index(request.known_ids) for request in requests]
        lengths = [len(request.known_ids) for request in requests]
        cache.enter(rows, lengths, [shifts[row] for row in rows])
        self._running += requests

        row_logits = logits[torch.tensor(rows, device=self._device)]
        cache.on_device.enter(requests)
        cache.on_device.sample(row_logits, requests, self.version)
        self._accept()

    def _decode(self) -> None:
        """Run one forward over the last token of each row, and sample the next ones."""
        assert self._cache is not None
        logits = self._next_logits(self._cache)
        self._cache.window.advance()
        self._cache.on_device.sample(logits, [*self._running], self.version)
        self._accept()

    def _next_logits(self, cache: RowCache) -> Tensor:
        """Return logits (rows, V), from a recorded forward if possible, else from an ordinary one."""
        try:
            if self.new_recorder is None:
                return cache.logits(self.model, cache.on_device.last[:, None], cache.next_column())
            self._graphs = self._graphs or DecodeGraphs(self.model, cache, self.new_recorder())
            return self._graphs(cache.on_device.last)
        except CannotRecordError as error:
            logger.warning(
                "decode steps are launched one by one: they cannot be recorded (%s)", error
            )
            self.stop_recording()
        except LengthsError as error:
            logger.warning("decode steps take a mask: %s", error)
            self.model.set_attn_implementation("sdpa")
            cache.window.use_mask()
        return self._next_logits(
            cache
        )  # the retry overwrites the column that the failed forward wrote

    def _accept(self, late: int | None = None) -> None:
        """Record sampled tokens, except those of the last ``late`` steps, and free the rows that ended."""
        cache = self._cache
        if cache is None:
            return

        for sampled in cache.on_device.arrived(late):
            rows = {request.number: row for row, request in enumerate(self._running)}
            ended = sampled.record(rows, self.decode)
            for request, reason in ended:
                parked = None
                if request.park:
                    states = cache.park(rows[request.number], len(request.known_ids) - 1)
                    parked = cache.prefixes.park(request, states)
                self._ended[request.number] = request.completion(reason, parked)
            self._free_rows([rows[request.number] for request, _ in ended])

    def _free_rows(self, rows: list[int]) -> None:
        """Drop ``rows``; the last rows move to their places."""
        if not rows:
            return

        assert self._cache is not None
        moves = self._cache.leave(rows)
        for source, target in moves:
            self._running[target] = self._running[source]
        del self._running[len(self._running) - len(rows) :]
        self._cache.on_device.leave(moves, len(self._running))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _new_cache(engine: HFEngine) -> RowCache:
    """Make the cache for the rows that ``engine`` may decode, or that fit into memory if it sizes itself."""
    free = None
    if engine._sizes_itself:
        free = free_memory(engine._device) if engine.free is None else engine.free
    return RowCache(
        engine.model,
        engine.eos_token_ids,
        max_rows=engine.max_batch_size,
        free=free,
        version=engine.version,
        sampled_ids=engine.sampled_ids,
    )


def _default_rows(device: torch.device) -> int:
    return ROWS_ON_CPU if device.type == "cpu" else ROWS_ON_GPU


@contextmanager
def _without_flash_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace flash attention inside: it copies the keys and values of padded rows at every step."""
    chosen = model.config._attn_implementation
    if chosen == "flash_attention_2":
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        if chosen == "flash_attention_2":
            model.set_attn_implementation(chosen)
