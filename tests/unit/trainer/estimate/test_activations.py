"""Activations, against the tensors that real models save and caches that they fill."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from openppo.models import Actor
from openppo.models.attention import use_cpu_attention, use_cuda_attention
from openppo.models.padding import rounded_width
from openppo.rollout.row_cache import PromptCache, RowCache
from openppo.trainer.estimate.activations import (
    Pass,
    generation_peaks,
    inference_peak,
    saved_by_head,
    saved_by_layers,
    saved_per_layer,
    training_peak,
)
from openppo.trainer.estimate.shapes import ModelShape, model_shape

VOCABULARY, ROWS, LENGTH, PROMPT = 64, 4, 96, 32
SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 8}
CONFIGS = [
    LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **SIZES),
    Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES),
    Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=32, **SIZES),
]


def saved_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of all storages that autograd saves in a forward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*inputs)
    return sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in parameters)


@pytest.fixture
def batch() -> Iterator[tuple[torch.Tensor, ...]]:
    """Sequences, attention mask and action mask."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    action_mask = mask.clone()
    action_mask[:, :PROMPT] = False
    yield torch.zeros(ROWS, LENGTH, dtype=torch.int64), mask, action_mask


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_a_forward_saves_is_counted(
    config: PreTrainedConfig, dtype: torch.dtype, lora_rank: int, checkpointing: bool, batch: tuple[torch.Tensor, ...]
) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shape, s = model_shape(config, "vocabulary"), dtype.itemsize
    asked = Pass(ROWS, LENGTH, LENGTH - PROMPT, on_cpu=dtype is torch.float32)  # where SDPA takes keys as they are
    counted = saved_by_layers(shape, asked, s, checkpointing, lora_rank) + saved_by_head(shape, asked, s, lora_rank)
    if checkpointing:  # the layer that is computed again is not saved yet
        counted -= saved_per_layer(shape, s, lora_rank) * asked.tokens
    counted += s * ROWS * (LENGTH - PROMPT) * VOCABULARY
    assert counted == pytest.approx(saved_bytes(Actor(model, lora_rank=lora_rank).train(), *batch), rel=0.03)


@pytest.mark.parametrize("length", [96, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_attention_keeps_on_cpus_is_counted(
    dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[0]), dtype=dtype)  # which it writes into
    everything = torch.ones(ROWS, length, dtype=torch.bool)
    inputs = torch.zeros(ROWS, length, dtype=torch.int64), everything, everything
    by_torch = saved_bytes(Actor(model).train(), *inputs)
    use_cpu_attention(model)
    shape, s = model_shape(CONFIGS[0], "vocabulary"), dtype.itemsize
    width = rounded_width(length) if dtype is torch.bfloat16 else length
    counted = saved_by_layers(shape, Pass(ROWS, width, length, on_cpu=True), s, checkpointing=False)
    more = counted - shape.layers * saved_per_layer(shape, s) * ROWS * width
    assert (more > 0) == (dtype is torch.bfloat16)
    assert more == pytest.approx(saved_bytes(Actor(model).train(), *inputs) - by_torch, rel=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_gpus_repeat_are_counted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = next(config for config in CONFIGS if config.num_key_value_heads < config.num_attention_heads)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    everything = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    inputs = torch.zeros(ROWS, LENGTH, dtype=torch.int64), everything, everything
    by_torch = saved_bytes(Actor(model).train(), *inputs)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.cuda, "is_available", lambda: True)
        on_gpu.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        use_cuda_attention(model)
    more = saved_bytes(Actor(model).train(), *inputs) - by_torch
    shape, s = model_shape(config, "vocabulary"), dtype.itemsize
    layers = saved_by_layers(shape, Pass(ROWS, LENGTH, LENGTH), s, checkpointing=False)
    assert layers - shape.layers * saved_per_layer(shape, s) * ROWS * LENGTH == more
    assert (more > 0) == (dtype is torch.float32)


def test_the_cache_of_generation_is_the_engines() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[2], dtype=torch.float32)
    cache, prompts = RowCache(model.config.num_hidden_layers, 64), PromptCache(model.config.num_hidden_layers)
    model(torch.zeros(ROWS, PROMPT, dtype=torch.int64), past_key_values=prompts, use_cache=True)
    cache.reserve(ROWS, LENGTH)
    cache.enter(prompts, range(ROWS), [PROMPT] * ROWS)
    real = sum(t.nbytes for layer in cache.own for t in (layer.keys, layer.values))
    counted, _ = generation_peaks(model_shape(CONFIGS[2], "vocabulary"), ROWS, PROMPT, LENGTH - PROMPT, 4, False)
    assert counted == real


def test_activations_by_hand(shape: ModelShape) -> None:
    asked = Pass(rows=2, length=50, scored=10)
    layer = 2 * (4 + 2 * 2) * 100 + 2 * 2 * (100 + 50) + 4 * 2 * 300  # norms, attention, MLP: bytes for one token
    assert saved_per_layer(shape, 2) == layer
    assert saved_by_layers(shape, asked, 2, checkpointing=False) == 4 * layer * 100
    assert saved_by_layers(shape, asked, 2, checkpointing=True) == 4 * 2 * 100 * 100 + layer * 100
    head = (4 + 2) * 100 * 100 + 2 * 100 * 20
    logits = 2 * 10 * 1000 * (2 + 2 + 4 + 4)  # and their gradient, and two float32 chunks, here all of them
    passing = 2 * (2 * 100 + 3 * 300) * 100
    assert training_peak(shape, asked, 2, checkpointing=False) == 4 * layer * 100 + head + max(logits, passing)


def test_float32_chunks_of_logits_are_bounded(shape: ModelShape) -> None:
    small, large = (inference_peak(shape, Pass(rows, 1000, 1000), 4) for rows in (64, 65))
    assert large - small == 4 * (3 * 100 * 1000 + 1000 * 1000)  # no more chunks: they are 64 MiB already


def test_chunks_are_smaller_on_cpus(shape: ModelShape) -> None:
    cpu, gpu = (inference_peak(shape, Pass(64, 1000, 1000, on_cpu), 4) for on_cpu in (True, False))
    assert gpu - cpu == 2 * 4 * ((1 << 24) - (1 << 20))
