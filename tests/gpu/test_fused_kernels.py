"""liger-kernel's kernels beside the plain modules on a GPU: whole models, in both dtypes, prompts and decode steps."""

import copy
import importlib.util
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openppo.strategy.fused_kernels import fuse_kernels, fused_in
from openppo.types import SingleProcess
from tests.architectures import tiny_config
from tests.gpu.devices import ON_CUDA

ALL = ["RMSNorm", "gated MLP", "rotary embedding"]
MISSING = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"
)
pytestmark = [*ON_CUDA, MISSING]


def computed(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of prompts and of a decode step, and gradients, in float32."""
    logits = model(ids).logits
    gradients = torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        step = model(ids[:, -1:], past_key_values=cache).logits
    return [x.detach().float() for x in (logits, step, *gradients)]


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_model_computes_as_the_plain_one(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(tiny_config(name)).to("cuda", dtype).eval()
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    fuse_kernels(fused, torch.device("cuda"), SingleProcess())
    assert fused_in(fused) == ALL

    ids = torch.randint(3, 60, (3, 20), device="cuda")
    for ours, theirs, expected in zip(
        *(computed(model, ids) for model in (fused, plain, exact)), strict=True
    ):
        size = expected.norm().clamp_min(1e-6)
        rounding = float((theirs - expected).norm() / size)
        assert float((ours - expected).norm() / size) <= max(1.5 * rounding, 1e-4)


def test_gradients_of_kernels_are_equal_each_time() -> None:
    torch.manual_seed(0)
    model: Any = (
        AutoModelForCausalLM.from_config(tiny_config("qwen3")).to("cuda", torch.bfloat16).eval()
    )
    fuse_kernels(model, torch.device("cuda"), SingleProcess())
    embeddings = torch.randn(
        4, 64, model.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    layer = model.model.layers[0]

    def gradients() -> list[torch.Tensor]:
        output = layer.mlp(layer.input_layernorm(embeddings))
        weights = [layer.input_layernorm.weight, layer.mlp.gate_proj.weight]
        return list(torch.autograd.grad(output.float().square().sum(), [embeddings, *weights]))

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), first))
