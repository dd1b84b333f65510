"""What sampling needs of each row, on the device: a decode step copies nothing there, and one small tensor back."""

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
    """Forwards that are launched before the host reads what one before them sampled; a CPU gains nothing by it."""
    return 1 if device.type == "cuda" else 0


@dataclass(eq=False)
class Sampled:
    """Tokens of ``requests``, of weights of one ``version``, on their way to the host."""

    requests: list[Request]
    version: int
    packed: Tensor  # (3, requests) float64: token id, log-prob, whether EOS or a stop token ends it there
    copied: torch.cuda.Event | None

    def record(
        self, current: Collection[int], decode: Decode | None
    ) -> list[tuple[Request, FinishReason]]:
        """Add the tokens to requests that are ``current``, by number; returns those that end, and why.

        Others have ended or were cancelled while their token was under way. ``FloatingPointError`` for logits of NaN.
        """
        if self.copied is not None:
            self.copied.synchronize()
        token_ids, log_probs, is_end = self.packed.tolist()
        if not math.isfinite(sum(log_probs)):
            raise FloatingPointError(
                "generation: the policy's logits are not finite, nor may be its weights."
            )
        ended = []
        for request, token, log_prob, ends in zip(
            self.requests, token_ids, log_probs, is_end, strict=True
        ):
            if request.number in current:
                request.token_ids.append(int(token))
                request.log_probs.append(log_prob)
                request.versions.append(self.version)
                reason = finish_reason(request.token_ids, request.params, bool(ends), decode=decode)
                ended += [] if reason is None else [(request, reason)]
        return ended


class DeviceRows:
    """Last ids (B,), numbers of sampled tokens (B,) and uniform numbers (B, longest), in the order of the rows.

    What was sampled is handed out by ``arrived``, on a GPU when the next forward has been launched. So a row that ends
    is decoded once more, and that token is dropped.
    """

    def __init__(self, device: torch.device, eos_token_ids: Collection[int]) -> None:
        self.device, self.eos_token_ids = device, eos_token_ids
        self.late = steps_late(device)
        self.last = self._n_sampled = torch.zeros(0, dtype=torch.long, device=device)
        self._uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._unread: deque[Sampled] = deque()
        self._ends: dict[SamplingParams, Tensor] = {}
        self._parts: list[
            tuple[SamplingParams, Tensor | slice]
        ] = []  # of all rows; empty: not known

    def enter(self, requests: Sequence[Request]) -> None:
        """Add rows, with their uniform numbers."""
        width = max(
            self._uniforms.shape[1], *(request.params.max_new_tokens for request in requests)
        )
        entering = pad_sequence([request.uniforms for request in requests], batch_first=True).to(
            self.device
        )
        wide = [
            pad(uniforms, (0, width - uniforms.shape[1])) for uniforms in (self._uniforms, entering)
        ]
        self._uniforms = torch.cat(wide)
        n_sampled = torch.tensor(
            [len(request.token_ids) for request in requests], device=self.device
        )
        self._n_sampled = torch.cat([self._n_sampled, n_sampled])
        self.last = torch.cat([self.last, torch.zeros_like(n_sampled)])
        self._parts = []

    def leave(self, moves: Sequence[tuple[int, int]], n_left: int) -> None:
        """Keep so many rows, after ``moves`` of (from, to)."""
        order = [*range(n_left)]
        for source, target in moves:
            order[target] = source
        rows = torch.tensor(order, dtype=torch.long, device=self.device)
        self.last = self.last[rows]
        self._n_sampled = self._n_sampled[rows]
        self._uniforms = self._uniforms[rows]
        self._parts = []

    def sample(self, logits: Tensor, requests: list[Request], version: int) -> None:
        """Draw the next token of ``requests``, the last rows, by ``logits`` (requests, V)."""
        first = len(self.last) - len(requests)
        parts = self._parts if first == 0 and self._parts else self._split(requests)
        if first == 0:
            self._parts = parts
        n_sampled, packed = (
            self._n_sampled[first:],
            logits.new_zeros(3, len(requests), dtype=torch.float64),
        )
        places = n_sampled.clamp(max=self._uniforms.shape[1] - 1)[
            :, None
        ]  # a token to be dropped has no number
        uniforms = self._uniforms[first:].gather(1, places)[:, 0]
        for params, rows in parts:
            ends, chosen = self._ends[params], logits[rows]
            if params.min_new_tokens > 0:
                is_early = (n_sampled[rows] < params.min_new_tokens)[:, None]
                chosen = chosen.index_copy(
                    1, ends, chosen[:, ends].masked_fill(is_early, -torch.inf)
                )
            token_ids, log_probs = sample(chosen, uniforms[rows], params)
            packed[:, rows] = torch.stack(
                [x.double() for x in (token_ids, log_probs, torch.isin(token_ids, ends))]
            )
        self.last[first:] = packed[0].long()
        n_sampled += 1
        packed = packed.to("cpu", non_blocking=True)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._unread.append(Sampled(requests, version, packed, copied=copied))

    def arrived(self, late: int | None = None) -> Iterator[Sampled]:
        """What was sampled, oldest first, but for the last ``late`` steps."""
        while len(self._unread) > (self.late if late is None else late):
            yield self._unread.popleft()

    def _split(self, requests: Sequence[Request]) -> list[tuple[SamplingParams, Tensor | slice]]:
        """Rows that are sampled in the same way."""
        by_params: dict[SamplingParams, list[int]] = {}
        for row, request in enumerate(requests):
            by_params.setdefault(request.params, []).append(row)
        for params in by_params.keys() - self._ends.keys():
            ends = sorted({*self.eos_token_ids, *params.stop_token_ids})
            self._ends[params] = torch.tensor(ends, dtype=torch.long, device=self.device)
        if len(by_params) == 1:
            return [(params, slice(None)) for params in by_params]
        return [
            (params, torch.tensor(rows, device=self.device)) for params, rows in by_params.items()
        ]
