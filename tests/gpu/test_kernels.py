"""Kernels that a GPU chooses, in the dtypes and with the grouped heads that are used there; bodies run on CPUs too."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from openppo.media import TokenIds
from openppo.models import Actor
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, ModelInputs, SamplingParams
from tests.gpu.devices import (
    DEVICES,
    DTYPES,
    ON_CUDA,
    SYNCHRONIZING,
    VOCABULARY,
    grouped_actor,
    recorder,
    slow_attention,
    synchronizations,
    traced,
)

PROMPTS = [
    [1 + (7 * row + i) % 500 for i in range(3 + 11 * row)] for row in range(16)
]  # of 3 to 168 tokens
MOST_WAITS = {False: 5, True: 4}
"""By reading: ids, first columns and uniforms to the device, ids and log-probs back. Recorded steps copy once less."""


def rows(lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids (B, L), and their mask, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids.to(device), mask.to(device)


def sampled(
    actor: Actor, device: str, recorded: bool, n_tokens: int | None = None
) -> list[Completion]:
    n_tokens = n_tokens or (200 if device == "cuda" else 30)
    engine = HFEngine(actor.model, [2], 0, 8, new_recorder=recorder(device) if recorded else None)
    return engine.generate(
        [TokenIds(ids) for ids in PROMPTS], SamplingParams(n_tokens), list(range(len(PROMPTS)))
    )


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_bfloat16_decode_errs_no_more_than_a_forward(device: str, recorded: bool) -> None:
    """Both against float32 with the same weights; grouped heads, rows that start at different columns."""
    actor = grouped_actor(device, torch.bfloat16)
    exact = grouped_actor(device, torch.bfloat16).float()
    of_decode, of_forward, largest = [], [], []
    for prompt, completion in zip(PROMPTS, sampled(actor, device, recorded), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        expected, forward = (
            model(ModelInputs(ids, mask))[0, len(prompt) :].cpu() for model in (exact, actor)
        )
        of_decode.append((torch.tensor(completion.log_probs) - expected).abs())
        of_forward.append((forward - expected).abs())
        largest.append(float(expected.abs().max()))
    assert max(largest) > 8, "distributions are far from uniform, so that wrong attention shows"
    assert torch.cat(of_decode).mean() < 2 * torch.cat(of_forward).mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_no_pass_uses_cudnn_or_math_attention(device: str, dtype: torch.dtype) -> None:
    actor = grouped_actor(device, dtype)

    def train() -> None:
        actor.train()(ModelInputs(*rows([190, 77, 130], device))).sum().backward()

    def read() -> None:
        with torch.no_grad():
            actor.eval()(ModelInputs(*rows([190, 77, 130], device)))

    passes: dict[str, Callable[[], Any]] = {"training": train, "experience": read}
    passes["decode"] = lambda: sampled(actor.eval(), device, recorded=False, n_tokens=4)
    for name, work in passes.items():
        names = traced(work, device)
        assert slow_attention(names) == [], name
        assert any("attention" in one for one in names) or name == "decode", name


def test_forced_math_attention_is_seen_in_a_trace() -> None:
    queries = torch.zeros(1, 2, 8, 16)
    with sdpa_kernel(SDPBackend.MATH):
        names = traced(
            lambda: torch.nn.functional.scaled_dot_product_attention(queries, queries, queries),
            "cpu",
        )
    assert slow_attention(names) == ["aten::_scaled_dot_product_attention_math"]


@pytest.mark.gpu
@ON_CUDA[1]
def test_training_in_bfloat16_may_use_flash_attention() -> None:
    """As transformers calls SDPA: causal, no mask, heads in groups."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs a GPU of compute capability 8.0")
    grouped_actor("cuda", torch.bfloat16)  # sets the process up
    query = torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.zeros(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    given = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, True, True)
    assert torch.backends.cuda.can_use_flash_attention(given, True)
    assert not torch.backends.cuda.can_use_cudnn_attention(given, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "length", [192, 704]
)  # 64 more than a multiple of 128: cuDNN's gradients are NaN there
def test_packed_documents_have_the_gradients_of_single_ones(
    length: int, device: str, dtype: torch.dtype
) -> None:
    actor = grouped_actor(device, dtype)
    ids, mask = rows([length], device)
    cut = length // 3
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).to(device)[None]
    actions = mask.clone()
    actions[0, [0, cut]] = False

    def gradients(*losses: torch.Tensor) -> torch.Tensor:
        actor.zero_grad()
        torch.stack(losses).sum().backward()
        return torch.cat(
            [p.grad.float().flatten() for p in actor.parameters() if p.grad is not None]
        )

    packed = gradients(actor(ModelInputs(ids, mask, position_ids=positions), actions).sum())
    parts = (slice(cut), slice(cut, length))
    alone = gradients(
        *(actor(ModelInputs(ids[:, part], mask[:, part]), actions[:, part]).sum() for part in parts)
    )
    assert packed.isfinite().all()
    share = float((packed - alone).norm() / alone.norm())
    assert share < (1e-4 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_step_waits_for_the_device_a_few_times(device: str, recorded: bool) -> None:
    actor, waits = grouped_actor(device, torch.bfloat16), []
    for n_rows in (4, 16):
        engine = HFEngine(
            actor.model, [], 0, 16, new_recorder=recorder(device) if recorded else None
        )
        for seed, prompt in enumerate(PROMPTS[:n_rows]):
            engine.submit(TokenIds(prompt), SamplingParams(24), seed)
        for _ in range(8):  # reads all prompts, records a step
            engine.step()
        with synchronizations(device) as found:
            for _ in range(10):
                engine.step()
        waits.append(len(found))
    assert waits[0] == waits[1], "whatever the rows"
    assert waits[0] <= 10 * MOST_WAITS[recorded]


def test_waits_are_counted_by_what_torch_says() -> None:
    with synchronizations("cpu") as found:
        warnings.warn(f"{SYNCHRONIZING} (function warn_or_error_on_sync)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(found) == 1
