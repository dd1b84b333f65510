"""Inputs of sampling on the device, by row.

A decode step copies nothing to the device, and one small tensor back.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from openppo.rollout.requests import Request
from openppo.rollout.sampling import Decode, finish_reason, sample
from openppo.types import FinishReason, SamplingParams


def steps_late(device: torch.device) -> int:
    """Number of forwards that are launched before the host reads the tokens of an earlier one."""
    return 1 if device.type == "cuda" else 0


@dataclass(eq=False)
class Sampled:
    """Tokens of ``requests``, sampled with weights of one ``version``, on their way to the host."""

    requests: list[Request]
    version: int
    packed: Tensor
    """(3, requests) float64: token id, log-prob, and 1 for EOS and stop tokens."""
    copied: torch.cuda.Event | None

    def record(
        self, current: Collection[int], decode: Decode | None
    ) -> list[tuple[Request, FinishReason]]:
        """Add the tokens to requests whose numbers are ``current``; return those that end, and why.

        Other requests have ended or were cancelled while their token was under way. ``FloatingPointError`` for logits
        of NaN.
        """
        if self.copied is not None:
            self.copied.synchronize()
        token_ids, log_probs, is_end = self.packed.tolist()
        if not math.isfinite(sum(log_probs)):
            raise FloatingPointError(
                "generation: the policy's logits are not finite, nor may be its weights."
            )

        ended = []
        tokens = zip(self.requests, token_ids, log_probs, is_end, strict=True)
        for request, token_id, log_prob, ends in tokens:
            if request.number not in current:
                continue

            request.token_ids.append(int(token_id))
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            reason = finish_reason(request.token_ids, request.params, bool(ends), decode=decode)
            if reason is not None:
                ended.append((request, reason))
        return ended


class DeviceRows:
    """Last ids (B,), numbers of sampled tokens (B,) and uniform numbers (B, longest) of rows.

    ``arrived`` hands out sampled tokens; on a GPU, only when the next forward has been launched. So a row that ends is
    decoded once more, and that token is dropped.
    """

    def __init__(self, device: torch.device, eos_token_ids: Collection[int]) -> None:
        self.device = device
        self.eos_token_ids = eos_token_ids
        self.late = steps_late(device)
        self.last = self._n_sampled = torch.zeros(0, dtype=torch.long, device=device)
        self._uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._unread: deque[Sampled] = deque()
        self._ends: dict[SamplingParams, Tensor] = {}
        self._rows_by_params: list[tuple[SamplingParams, Tensor | slice]] = []
        """Split of all rows; empty after rows have changed."""

    def enter(self, requests: Sequence[Request]) -> None:
        """Add rows, with their uniform numbers."""
        entering = pad_sequence([request.uniforms for request in requests], batch_first=True)
        entering = entering.to(self.device)
        longest = max(request.params.max_new_tokens for request in requests)
        width = max(self._uniforms.shape[1], longest)
        self._uniforms = torch.cat([_widened(self._uniforms, width), _widened(entering, width)])

        counts = [len(request.token_ids) for request in requests]
        n_sampled = torch.tensor(counts, device=self.device)
        self._n_sampled = torch.cat([self._n_sampled, n_sampled])
        self.last = torch.cat([self.last, torch.zeros_like(n_sampled)])
        self._rows_by_params = []

    def leave(self, moves: Sequence[tuple[int, int]], n_left: int) -> None:
        """Keep the first ``n_left`` rows, after ``moves`` of (from, to)."""
        order = [*range(n_left)]
        for source, target in moves:
            order[target] = source
        rows = torch.tensor(order, dtype=torch.long, device=self.device)
        self.last = self.last[rows]
        self._n_sampled = self._n_sampled[rows]
        self._uniforms = self._uniforms[rows]
        self._rows_by_params = []

    def sample(self, logits: Tensor, requests: list[Request], version: int) -> None:
        """Draw the next token of ``requests``, the last rows, by ``logits`` (requests, V)."""
        first = len(self.last) - len(requests)
        n_sampled = self._n_sampled[first:]
        # A row that has ended draws a token that is dropped, past its last number.
        places = n_sampled.clamp(max=self._uniforms.shape[1] - 1)[:, None]
        uniforms = self._uniforms[first:].gather(1, places)[:, 0]

        packed = logits.new_zeros(3, len(requests), dtype=torch.float64)
        for params, rows in self._split(requests):
            ends = self._ends[params]
            row_logits = logits[rows]
            if params.min_new_tokens > 0:
                is_early = (n_sampled[rows] < params.min_new_tokens)[:, None]
                end_logits = row_logits[:, ends].masked_fill(is_early, -torch.inf)
                row_logits = row_logits.index_copy(1, ends, end_logits)
            token_ids, log_probs = sample(row_logits, uniforms[rows], params)
            is_end = torch.isin(token_ids, ends)
            packed[:, rows] = torch.stack([token_ids.double(), log_probs.double(), is_end.double()])

        self.last[first:] = packed[0].long()
        n_sampled += 1
        packed = packed.to("cpu", non_blocking=True)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._unread.append(Sampled(requests, version, packed, copied=copied))

    def arrived(self, late: int | None = None) -> Iterator[Sampled]:
        """Yield sampled tokens, oldest first, but for the last ``late`` steps."""
        n_unread = self.late if late is None else late
        while len(self._unread) > n_unread:
            yield self._unread.popleft()

    def _split(self, requests: Sequence[Request]) -> list[tuple[SamplingParams, Tensor | slice]]:
        """Rows of ``requests``, the last ones, by their parameters; kept if they are all rows."""
        are_all = len(requests) == len(self.last)
        if are_all and self._rows_by_params:
            return self._rows_by_params

        by_params: dict[SamplingParams, list[int]] = {}
        for row, request in enumerate(requests):
            by_params.setdefault(request.params, []).append(row)
        for params in by_params.keys() - self._ends.keys():
            ends = sorted({*self.eos_token_ids, *params.stop_token_ids})
            self._ends[params] = torch.tensor(ends, dtype=torch.long, device=self.device)

        split: list[tuple[SamplingParams, Tensor | slice]] = []
        for params, rows in by_params.items():
            row_index: Tensor | slice = slice(None)
            if len(by_params) > 1:
                row_index = torch.tensor(rows, device=self.device)
            split.append((params, row_index))
        if are_all:
            self._rows_by_params = split
        return split


def _widened(uniforms: Tensor, width: int) -> Tensor:
    """``uniforms`` (rows, numbers) with zeros on the right, (rows, ``width``)."""
    return pad(uniforms, (0, width - uniforms.shape[1]))
