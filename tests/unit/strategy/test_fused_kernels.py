"""Modules that get kernels, by a stand-in with liger-kernel's signatures; real kernels in Triton's interpreter."""

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.strategy import fused_bindings, fused_forwards
from openppo.strategy.fused_kernels import fuse_kernels, fused_in, has_kernels
from openppo.types import ModelInputs, SingleProcess
from tests.architectures import NAMES, tiny_config
from tests.fork_server import REPO

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 2], [1, 2, 1, 2]])
ALL = {"RMSNorm", "gated MLP", "rotary embedding"}
FUSED = {
    "llama": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "gemma2": ALL,
    "gemma3_text": ALL,
    "mistral": ALL,
    "phi3": ALL,
    "gpt2": set(),
}


def model_of(name: str) -> Any:
    """A tiny causal language model, whose norms have random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
    return model


NORMED: list[int] = []
"""Rows of each call of the stand-in's norm."""


class Norm:
    """Of ``LigerRMSNormFunction``."""

    @staticmethod
    def apply(x, weight, eps, offset, casting, in_place):
        assert not in_place, "a residual's gradient would be overwritten"
        NORMED.append(len(x))
        normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        if casting == "llama":
            return (offset + weight) * normalized.to(x.dtype)
        return ((offset + weight.float()) * normalized).to(x.dtype)


class Rotary:
    """Of ``LigerRopeFunction``; like it, takes one row of all tokens."""

    @staticmethod
    def apply(queries, keys, cos, sin):
        assert len(queries) == len(keys) == len(cos) == 1

        def rotate(x):
            left, right = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

        return rotate(queries), rotate(keys)


class SiLU:
    @staticmethod
    def apply(gate, up):
        return F.silu(gate) * up


class GELU:
    @staticmethod
    def apply(gate, up):
        return F.gelu(gate, approximate="tanh") * up


class Joined:
    @staticmethod
    def apply(joined):
        assert joined.dim() == 2
        gate, up = joined.chunk(2, -1)
        return F.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = fused_forwards.Kernels(Norm, Rotary, SiLU, GELU, Joined)
    for module in (fused_forwards, fused_bindings):
        monkeypatch.setattr(module, "load_kernels", lambda: stand_in)
        monkeypatch.setattr(module, "kernel_errors", lambda: fused_forwards.ERRORS)


def outputs(model: nn.Module, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """Logits, those of a decode step, and all gradients."""
    logits = model(ids).logits
    gradients = torch.autograd.grad(
        logits.square().sum(), [p for p in model.parameters() if p.requires_grad]
    )
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    return [logits.detach(), model(ids[:, -1:], past_key_values=cache).logits.detach(), *gradients]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FUSED)
def test_every_family_gets_the_kernels_that_agree(name: str) -> None:
    model = model_of(name)
    plain, names = copy.deepcopy(model), list(model.state_dict())
    counts = fuse_kernels(model, CPU, SingleProcess())
    assert set(fused_in(model)) == set(counts) == FUSED[name]
    assert list(model.state_dict()) == names
    for fused, expected in zip(outputs(model), outputs(plain), strict=True):
        torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(FUSED)))
def test_an_architecture_with_kernels_computes_as_without(name: str) -> None:
    model = model_of(name)
    plain = copy.deepcopy(model)
    fuse_kernels(model, CPU, SingleProcess())
    options = {"use_cache": False}  # as in training
    torch.testing.assert_close(
        model(IDS, **options).logits, plain(IDS, **options).logits, rtol=1e-3, atol=1e-4
    )


@pytest.mark.usefixtures("kernels")
def test_other_models_of_the_family_stay_plain() -> None:
    model, other = (model_of("llama") for _ in range(2))
    fuse_kernels(model, CPU, SingleProcess())
    before = len(NORMED)
    other(IDS)
    assert len(NORMED) == before
    assert fused_in(other) == []
    model(IDS)
    assert len(NORMED) > before


@pytest.mark.usefixtures("kernels")
def test_a_copy_reads_its_own_weights() -> None:
    model = model_of("llama")
    fuse_kernels(model, CPU, SingleProcess())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert copied(IDS).logits.abs().max() > 0
    assert copied.model.norm.forward.__self__ is copied.model.norm


@pytest.mark.usefixtures("kernels")
def test_tensors_on_another_device_go_to_the_plain_module() -> None:
    model = model_of("llama")
    expected = model(IDS).logits
    fuse_kernels(model, CPU, SingleProcess())
    for module in model.modules():
        if "fused_settings" in vars(module) and module.fused_settings is not None:
            module.fused_settings = (None, (), "cuda")
    assert torch.equal(model(IDS).logits, expected) or torch.allclose(
        model(IDS).logits, expected, atol=1e-6
    )


class WrongDecoding(Rotary):
    """Right for prompts, wrong for one token a row, as the function that the library exports."""

    @staticmethod
    def apply(queries, keys, cos, sin):
        rotated = Rotary.apply(queries, keys, cos, sin)
        return rotated if queries.shape[2] == 14 else tuple(x + 1 for x in rotated)


class WrongGradient(SiLU):
    @staticmethod
    def apply(gate, up):
        return F.silu(gate).detach() * up + 0 * gate


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("part", "wrong", "kind"),
    [
        ("rotary", WrongDecoding, "rotary embedding of LlamaAttention"),
        ("silu_product", WrongGradient, "gated MLP of LlamaMLP, SiLUActivation"),
    ],
)
def test_a_kernel_that_does_not_agree_is_left_out(
    part: str,
    wrong: Any,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="openppo")
    parts = vars(fused_forwards.load_kernels()) | {part: wrong}
    for module in (fused_forwards, fused_bindings):
        monkeypatch.setattr(module, "load_kernels", lambda: fused_forwards.Kernels(**parts))
    model = model_of("llama")
    fuse_kernels(model, CPU, SingleProcess())
    assert kind.split(" of")[0] not in fused_in(model)
    (line,) = caplog.messages
    assert f"; as they were: {kind} (differs by " in line


@pytest.mark.usefixtures("kernels")
def test_ranks_that_choose_differently_stay_plain(caplog: pytest.LogCaptureFixture) -> None:
    class Two(SingleProcess):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, dict.fromkeys(value)]

    caplog.set_level(logging.INFO, logger="openppo")
    model = model_of("llama")
    assert not fuse_kernels(model, CPU, Two())
    assert fused_in(model) == []
    assert (
        "LlamaForCausalLM stays as it is" in caplog.text
        and "(differs on another rank)" in caplog.text
    )


@pytest.mark.usefixtures("kernels")
def test_a_critic_is_fused_as_a_policy_is(tmp_path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    critic = get_llm_for_sequence_regression(str(tmp_path), "critic")
    mask = torch.ones_like(IDS).bool()
    expected = critic(ModelInputs(IDS, mask)).detach()
    fuse_kernels(critic, CPU, SingleProcess())
    assert set(fused_in(critic)) == ALL
    torch.testing.assert_close(
        critic(ModelInputs(IDS, mask)).detach(), expected, rtol=1e-4, atol=1e-5
    )


class NormFunction(torch.autograd.Function):
    """With the backward pass that torch.compile traces, too."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset=0.0, casting="llama", in_place=True, row_mode=None):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return x * scale * (weight + offset)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        normalized, inner = x * scale, gradient * (weight + ctx.offset)
        of_x = scale * (inner - normalized * (inner * normalized).mean(-1, keepdim=True))
        of_weight = (gradient * normalized).flatten(0, -2).sum(0)
        return of_x, of_weight, None, None, None, None, None


class SiLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        of_gate = gradient * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
        return of_gate, gradient * gate * sigmoid, None, None


@pytest.mark.usefixtures("kernels")
def test_a_compiled_layer_is_one_graph_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    product = fused_forwards._backward_once(SiLUFunction)
    functions = fused_forwards.Kernels(NormFunction, Rotary, product, GELU, Joined)
    for module in (fused_forwards, fused_bindings):
        monkeypatch.setattr(module, "load_kernels", lambda: functions)
    model = model_of("qwen3").train()
    expected = outputs(model)
    assert set(fuse_kernels(model, CPU, SingleProcess())) == ALL
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for compiled, plain in zip(outputs(model), expected, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_random_numbers_are_drawn_as_without_kernels() -> None:
    model = model_of("llama")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fuse_kernels(model, CPU, SingleProcess())
    assert torch.equal(torch.rand(4), expected)


def test_on_a_cpu_nothing_is_looked_for() -> None:
    assert not has_kernels(CPU, SingleProcess())
    assert "liger_kernel" not in sys.modules


INTERPRETED = """
import tests.triton_interpreter
import json, torch
from openppo.strategy import fused_bindings, fused_kernels
from tests.unit.strategy.test_fused_kernels import CPU, model_of, outputs
from openppo.types import SingleProcess
import copy
fused_bindings._LARGEST_ERRORS = {torch.float32: 1e-4}  # bfloat16 of the interpreter itself is wrong
found = {}
for name in ("qwen3", "gemma3_text", "phi3"):
    model = model_of(name)
    plain = copy.deepcopy(model)
    kinds = fused_kernels.fuse_kernels(model, CPU, SingleProcess())
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(outputs(model), outputs(plain)) if y.norm() > 0]
    found[name] = [sorted(kinds), max(errors)]
found["twice"] = ""
model = model_of("qwen3")
fused_kernels.fuse_kernels(model, CPU, SingleProcess())
logits = model(torch.ones(1, 3, dtype=torch.long)).logits.sum()
logits.backward(retain_graph=True)
try:
    logits.backward()
except RuntimeError as error:
    found["twice"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("liger_kernel", "triton"))),
    reason="liger-kernel or triton is not installed",
)
def test_the_kernels_agree_with_plain_modules_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", INTERPRETED]
    ended = subprocess.run(
        words, env=environment, cwd=REPO, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert "modified inplace" in found.pop("twice"), "a second backward would be wrong"
    for kinds, error in found.values():
        assert set(kinds) == ALL
        assert error < 1e-5
