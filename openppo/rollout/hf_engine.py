"""Generation with the actor's own Hugging Face module: its weights are read in place, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from openppo.rollout.engine import PolicyWeights
from openppo.rollout.sampling import request_uniforms, sample
from openppo.tracking import progress
from openppo.types import Completion, FinishReason, NeverStops, SamplingParams, StopCheck


@dataclass
class _Request:
    number: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass
class _Batch:
    """Requests that are decoded together. Padding is on the left, here and nowhere else."""

    requests: list[_Request]
    cache: DynamicCache
    attention_mask: Tensor  # bool (B, tokens so far)
    next_input: Tensor  # int64 (B, 1): the token just sampled
    uniforms: Tensor  # float64 (B, max_new_tokens)
    steps: int = 1

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.requests = [self.requests[i] for i in rows.tolist()]
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]
        self.next_input = self.next_input[rows]
        self.uniforms = self.uniforms[rows]


class HFEngine:
    """``Engine`` over a causal language model of transformers.

    Waiting requests are taken in when the batch under way has ended, up to ``max_batch_size`` with equal
    sampling parameters; finished rows leave the batch. A sampled id in ``eos_token_ids`` ends a response and
    belongs to it. ``pad_token_id`` only fills places that the attention mask hides, so it may equal EOS.

    ``any_rank_busy`` puts several ranks in lockstep, for partitioned weights that cannot be gathered: it is
    asked before each step and combines the ranks' ``busy``; a rank with nothing to do then runs along. ``stop`` is
    asked likewise, and makes ``generate`` raise ``Interrupted``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_batch_size: int,
        any_rank_busy: Callable[[bool], bool] | None = None,
        show_progress: bool = False,
        stop: StopCheck | None = None,
    ) -> None:
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_size = max_batch_size
        self.any_rank_busy = any_rank_busy
        self.show_progress = show_progress
        self.stop = stop or NeverStops()
        self.version = 0
        self._numbers = count()
        self._waiting: list[_Request] = []
        self._batch: _Batch | None = None
        self._ended: dict[int, Completion] = {}

    @property
    def busy(self) -> bool:
        """True while a request waits or is being decoded."""
        return self._batch is not None or bool(self._waiting)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Queue a request and return its number."""
        if not prompt_ids:
            raise ValueError("a prompt needs at least one token")
        request = _Request(next(self._numbers), list(prompt_ids), params, seed)
        self._waiting.append(request)
        return request.number

    @torch.no_grad()  # not inference mode: under ZeRO-3 it would mark weights that are gathered inside
    def step(self) -> None:
        """One forward pass of the model: decode one token per row, or prefill waiting requests, or run along."""
        if self._batch is not None:
            self._decode(self._batch)
        elif self._waiting:
            self._prefill(self._admit())
        else:
            self.model(input_ids=self._tensor([[self.pad_token_id]]), use_cache=False)

    def collect(self) -> dict[int, Completion]:
        """Completions that ended since the last call, by request number."""
        ended, self._ended = self._ended, {}
        return ended

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Completions in the order of ``prompts``; request i is sampled with ``seeds[i]``."""
        longest_first = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
        place = {self.submit(prompts[i], params, seeds[i]): i for i in longest_first}
        done: dict[int, Completion] = {}
        with progress(len(prompts), "generation", enabled=self.show_progress) as bar:
            while self._goes_on():
                self.step()
                ended = self.collect()
                done |= {place[number]: completion for number, completion in ended.items()}
                bar.update(len(ended))
        self.stop()
        return [done[i] for i in range(len(prompts))]

    def awake(self, weights: PolicyWeights) -> AbstractContextManager[None]:
        """Inside, the module may be called: under ZeRO-3 it has whole weights, unless ranks decode in lockstep."""
        return weights.in_place(in_lockstep=self.any_rank_busy is not None)

    def _goes_on(self) -> bool:
        if self.stop.requested():
            self._waiting, self._batch = [], None
        return self.busy if self.any_rank_busy is None else self.any_rank_busy(self.busy)

    def _admit(self) -> list[_Request]:
        params = self._waiting[0].params
        taken = [request for request in self._waiting if request.params == params][: self.max_batch_size]
        numbers = {request.number for request in taken}
        self._waiting = [request for request in self._waiting if request.number not in numbers]
        return taken

    def _prefill(self, requests: list[_Request]) -> None:
        width = max(len(request.prompt_ids) for request in requests)
        pads = [width - len(request.prompt_ids) for request in requests]
        ids = [[self.pad_token_id] * pad + r.prompt_ids for pad, r in zip(pads, requests, strict=True)]
        places = torch.arange(width, device=self._device)
        mask = places >= self._tensor(pads)[:, None]  # (B, width)
        cache = DynamicCache(config=self.model.config)
        uniforms = torch.stack([request_uniforms(r.seed, r.params.max_new_tokens) for r in requests])
        logits = self._forward(self._tensor(ids), mask, _positions(mask), cache)
        if cache.get_seq_length() != width:
            raise ValueError(
                f"{type(self.model).__name__} keeps no key-value cache; such models cannot be sampled here."
            )
        self._batch = _Batch(requests, cache, mask, self._tensor([[0]]), uniforms.to(self._device), steps=0)
        self._accept(self._batch, logits)

    def _decode(self, batch: _Batch) -> None:
        logits = self._forward(
            batch.next_input, batch.attention_mask, _positions(batch.attention_mask)[:, -1:], batch.cache
        )
        self._accept(batch, logits)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]  # (B, V)

    def _accept(self, batch: _Batch, logits: Tensor) -> None:
        """Sample each row's next token, record it, and let ended rows go."""
        params = batch.requests[0].params
        tokens, log_probs = sample(logits, batch.uniforms[:, batch.steps], params)
        batch.steps += 1
        running = []
        for row, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
            request = batch.requests[row]
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            if token in self.eos_token_ids:
                self._end(request, FinishReason.EOS)
            elif len(request.token_ids) == params.max_new_tokens:
                self._end(request, FinishReason.LENGTH)
            else:
                running.append(row)
        batch.next_input = tokens[:, None]
        if not running:
            self._batch = None
            return
        if len(running) < len(batch.requests):
            batch.keep(self._tensor(running))
        batch.attention_mask = torch.nn.functional.pad(batch.attention_mask, (0, 1), value=True)

    def _end(self, request: _Request, reason: FinishReason) -> None:
        self._ended[request.number] = Completion(request.token_ids, request.log_probs, reason)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self._device)


def _positions(mask: Tensor) -> Tensor:
    """Position ids (B, T) of left-padded rows: the first real token is at 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
