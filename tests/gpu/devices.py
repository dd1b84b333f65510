"""What the tests of this folder share: devices, models with grouped heads, and what a pass did on a device."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.models import Actor
from openppo.models.attention import use_fast_attention
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.strategy.comm import set_up_gpu
from openppo.types import Completion

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
"""A body that runs on both is known to work before it meets a GPU."""
DTYPES = [torch.float32, torch.bfloat16]
VOCABULARY = 512
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""What torch warns of under ``torch.cuda.set_sync_debug_mode``."""


def grouped_actor(device: str, dtype: torch.dtype) -> Actor:
    """Four heads share two keys, of 64 elements each; as commands load it. Its logits depend on every token."""
    set_up_gpu(bf16=True)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).to(dtype)
    use_fast_attention(model)
    return Actor(model).eval().to(device)


def recorder(device: str) -> Callable[[], Any]:
    """CUDA graphs; without CUDA the same shapes, run again each time."""
    return CUDARecorder if device == "cuda" else lambda: lambda forward: forward


def traced(work: Callable[[], Any], device: str) -> set[str]:
    """Names of all operators and kernels of ``work``."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as recorded:
        work()
    return {event.key for event in recorded.key_averages()}


def slow_attention(names: set[str]) -> list[str]:
    """Those of cuDNN's attention, and of the kernel that writes all weights."""
    return sorted(name for name in names if "cudnn" in name or "attention_math" in name)


@contextmanager
def synchronizations(device: str) -> Iterator[list[str]]:
    """What torch says of each operation inside that waits for the device; nothing on a CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            found += [str(one.message) for one in caught if SYNCHRONIZING in str(one.message)]


def rounding_borders(
    ones: Sequence[Completion], others: Sequence[Completion], close: float = 1e-3
) -> int:
    """Number of responses that differ, each by a draw so near a border that rounding gave the next id.

    Fails if they differ in any other way. After such a draw a response may continue as it likes.
    """
    n_different = 0
    for one, other in zip(ones, others, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        first = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
        if first is None:
            assert len(one.token_ids) == len(other.token_ids)
        else:
            n_different += 1
            left, right = pairs[first]
            assert abs(left - right) == 1, f"token {first}: {left} and {right} are no neighbours"
        assert one.log_probs[:first] == pytest.approx(other.log_probs[:first], abs=close)
    return n_different
