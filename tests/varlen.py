"""torch's operator over unequal lengths as a loop of SDPA, since CPUs have no kernel for it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Call(NamedTuple):
    """What one call was given."""

    key: Tensor  # (T, G, D)
    starts: Tensor  # of queries
    key_starts: Tensor
    n_keys: Tensor | None


class VarlenLoop:
    """In place of ``varlen_attn``; remembers its ``calls``."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Tensor:
        """Queries are the last ones of the keys that their document has."""
        n_keys, (left, right), n_documents = (
            options.get("seqused_k"),
            options["window_size"],
            len(cu_seq_q) - 1,
        )
        assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32} and len(
            cu_seq_k
        ) == n_documents + 1
        assert cu_seq_q[-1] == len(query) and len(key) == len(value)
        self.calls.append(Call(key, cu_seq_q, cu_seq_k, n_keys))
        outputs = []
        for i, (start, first) in enumerate(zip(cu_seq_q.tolist(), cu_seq_k.tolist(), strict=True)):
            if i == n_documents:
                break
            end, last = (
                int(cu_seq_q[i + 1]),
                int(cu_seq_k[i + 1] if n_keys is None else first + n_keys[i]),
            )
            assert (
                0 < end - start <= max_q
                and end - start <= last - first <= max_k
                and last <= len(key)
            )
            queries, keys, values = query[start:end], key[first:last], value[first:last]
            places = torch.arange(last - first - (end - start), last - first)
            distance = places[:, None] - torch.arange(last - first)  # of keys, backwards
            seen = ((distance >= -right) | (right < 0)) & ((distance <= left) | (left < 0))
            heads = [
                tokens.transpose(0, 1)[None] for tokens in (queries, keys, values)
            ]  # (1, H, length, D)
            shared = {"scale": options["scale"], "enable_gqa": options["enable_gqa"]}
            outputs.append(
                F.scaled_dot_product_attention(*heads, attn_mask=seen, **shared)[0].transpose(0, 1)
            )
        return torch.cat(outputs)
