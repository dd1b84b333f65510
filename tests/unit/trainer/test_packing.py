"""Documents that share a row keep the log-probs and gradients that they have alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from openppo.datasets import TokenExample
from openppo.models import Actor
from openppo.trainer.supervised.batches import StepBatch, pack, packed_row_length, packing_is_exact, token_batch
from openppo.types import SingleProcess

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCAB = {"vocab_size": 40}
MAKERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**VOCAB, **SIZES, **o)),
    "qwen2": lambda **o: Qwen2ForCausalLM(Qwen2Config(**VOCAB, **SIZES, num_key_value_heads=2, **o)),
    "gpt_neox": lambda **o: GPTNeoXForCausalLM(GPTNeoXConfig(**VOCAB, **SIZES, **o)),
    "gpt2": lambda **o: GPT2LMHeadModel(GPT2Config(**VOCAB, n_embd=32, n_layer=2, n_head=4, **o)),
}


def actor_of(
    name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, initializer_range: float = 0.2
) -> Actor:
    torch.manual_seed(5)
    return Actor(MAKERS[name](attn_implementation=attention, initializer_range=initializer_range).to(dtype))


def documents(lengths: list[int]) -> list[TokenExample]:
    """Documents of random tokens; the loss leaves out every fourth token."""
    generator = torch.Generator().manual_seed(6)
    return [
        TokenExample(torch.randint(0, 40, (n,), generator=generator).tolist(), [t % 4 != 3 for t in range(n)])
        for n in lengths
    ]


DOCUMENTS = documents([9, 3, 1, 12, 5, 2, 7, 4])


def log_probs_and_gradient(actor: Actor, batch: StepBatch) -> tuple[list[float], list[Tensor]]:
    """Log-probs of all targets, sorted, and the gradient of their sum."""
    actor.zero_grad()
    found: list[float] = []
    for micro in batch.micro_batches:
        log_probs = actor(*micro[:3], temperature=1.0, position_ids=micro.position_ids)
        found += log_probs[micro.loss_mask].tolist()
        log_probs.sum().backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in actor.parameters()]
    return sorted(found), gradient


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_packed_documents_have_the_numbers_they_have_alone(name: str, attention: str) -> None:
    assert packing_is_exact(actor_of(name, attention, torch.bfloat16), CPU)
    actor = actor_of(name, attention)
    assert packing_is_exact(actor, CPU)
    alone, gradient = log_probs_and_gradient(actor, token_batch(DOCUMENTS, 1, 0, SingleProcess()))
    packed = token_batch(DOCUMENTS, 2, 0, SingleProcess(), pack_to=16)
    assert len(packed.micro_batches) == 2  # 42 tokens in 3 rows
    together, packed_gradient = log_probs_and_gradient(actor, packed)
    assert together == pytest.approx(alone, abs=1e-5)
    for one, other in zip(packed_gradient, gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


def without_positions(actor: Actor) -> Any:
    """An actor that drops position ids, so that a row is one document to it."""
    return lambda sequences, attention_mask, position_ids: actor(sequences, attention_mask)


def without_restart(actor: Actor) -> Any:
    """An actor that separates documents but embeds their tokens at their place in the row."""

    def forward(sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        starts = (position_ids == 0).cumsum(-1)
        return actor(sequences, attention_mask, position_ids=torch.arange(sequences.shape[1]) + 10 * starts)

    return forward


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (without_positions(actor_of("llama")), "change each other's outputs"),
        (without_positions(actor_of("llama", initializer_range=0.02)), "change each other's outputs"),
        (without_restart(actor_of("gpt2")), "their own by their place"),
        (lambda sequences, attention_mask: None, "takes no position ids"),
    ],
    ids=["mixes documents", "mixes them a little", "shifts documents", "refuses position ids"],
)
def test_the_probe_finds_models_that_cannot_and_says_so(
    model: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not packing_is_exact(model, CPU)
    assert reason in caplog.text and "documents are not packed" in caplog.text
    assert packed_row_length(model, documents([5]), 2048, CPU) is None


def test_rows_are_as_long_as_the_longest_document_and_512_where_that_is_allowed() -> None:
    for lengths, limit, expected in (
        ([5, 30], 2048, 512),
        ([5, 30], 100, 100),
        ([5, 700], 2048, 700),
        ([], 2048, None),
    ):
        assert packed_row_length(actor_of("llama"), documents(lengths), limit, CPU) == expected


def lengths_of(rows: list[list[TokenExample]]) -> list[list[int]]:
    return [[len(example.token_ids) for example in row] for row in rows]


def test_rows_are_filled_by_first_fit_of_the_longest_first() -> None:
    assert lengths_of(pack(documents([2, 7, 3, 5, 4, 6]), 10)) == [[7, 3], [6, 4], [5, 2]]
    assert lengths_of(pack(documents([12, 3, 10]), 10)) == [[12], [10], [3]]  # too long for any row: alone
    assert pack([], 10) == []
    examples = documents([1 + 7 * i % 29 for i in range(200)])
    rows = pack(examples, 32)
    assert sorted(id(e) for row in rows for e in row) == sorted(id(e) for e in examples)
    assert all(sum(row) <= 32 for row in lengths_of(rows))
    assert len(rows) <= 1.1 * sum(len(e.token_ids) for e in examples) / 32
