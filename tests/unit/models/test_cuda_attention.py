"""Grouped heads on GPUs: the choice as a pure function, and what reaches SDPA, seen on CPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.models.actor import Actor
from openppo.models.attention import repeats_keys
from openppo.models.loading import load_causal_lm
from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.rollout.hf_engine import HFEngine
from openppo.types import SamplingParams

H100, A100, T4, V100 = (9, 0), (8, 0), (7, 5), (7, 0)
IDS = torch.tensor([[5, 9, 3, 7, 4, 8], [6, 2, 9, 4, 0, 0]])
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


@pytest.mark.parametrize(
    ("dtype", "capability", "masked", "repeats"),
    [
        (torch.float32, H100, False, True),
        (torch.float32, H100, True, False),  # transformers repeats or packs
        (torch.bfloat16, H100, False, False),  # FlashAttention
        (torch.bfloat16, A100, False, False),
        (torch.bfloat16, T4, False, True),
        (torch.float16, V100, False, True),
        (torch.bfloat16, T4, True, False),
        (torch.float64, A100, False, True),
    ],
)
def test_keys_are_repeated_where_no_fast_kernel_shares_them(dtype, capability, masked, repeats):
    assert repeats_keys(dtype, capability, masked) == repeats


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 20}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **sizes)
    folder = tmp_path_factory.mktemp("grouped") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def on_gpu(monkeypatch):
    """Calls a loader as on a GPU of this capability; the model stays on the CPU."""

    def load(loader, *arguments, capability=H100, **options):
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "get_device_capability", lambda: capability)
            return loader(*arguments, **options)

    return load


@pytest.fixture
def heads(monkeypatch):
    """Heads of queries and of keys, and whether SDPA is to group them, in each of its calls."""
    seen: list[tuple[int, int, bool]] = []
    sdpa = nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        assert key.shape == value.shape
        seen.append((query.shape[1], key.shape[1], options.get("enable_gqa", False)))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    return seen


def load_policy(folder, bf16=False):
    return load_causal_lm(folder, bf16=bf16, flash_attn=False)


def run_actor(model):
    return Actor(model)(IDS, MASK)


def run_critic(model):
    return model(IDS, MASK)


def run_engine(model):
    """Prompts alike, which need no mask, and prompts of different lengths."""
    alike, unlike = [[5, 9]] * 2, [[5, 9], [7]]
    drawn = [HFEngine(model, [], 0, 4).generate(p, SamplingParams(3), [1, 2]) for p in (alike, unlike)]
    return torch.tensor([completion.log_probs for completions in drawn for completion in completions])


RUNS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any], Tensor]]] = {
    "actor": (load_policy, {}, run_actor),
    "engine": (load_policy, {}, run_engine),
    "critic": (get_llm_for_sequence_regression, {"role": "critic"}, run_critic),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_head_shares_keys_in_float32(name, saved, on_gpu, heads):
    loader, options, run = RUNS[name]
    torch.manual_seed(0)  # of a fresh head
    ours = run(on_gpu(loader, str(saved), **options))
    assert heads
    assert all(queries == keys and not grouped for queries, keys, grouped in heads)
    torch.manual_seed(0)
    theirs = run(loader(str(saved), **options))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_shared_keys(saved, on_gpu):
    gradients = []
    for load in (on_gpu(load_policy, str(saved)), LlamaForCausalLM.from_pretrained(saved)):
        run_actor(load).sum().backward()
        gradients.append([parameter.grad for parameter in load.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_fast_kernel_of_bfloat16_keeps_its_shared_keys(saved, on_gpu, heads):
    run_actor(on_gpu(load_policy, str(saved), bf16=True))
    assert set(heads) == {(4, 2, True)}
    heads.clear()
    run_actor(on_gpu(load_policy, str(saved), bf16=True, capability=T4))
    assert set(heads) == {(4, 4, False)}


def test_models_are_compiled_in_one_piece(saved, on_gpu):
    model = on_gpu(load_policy, str(saved))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_saved_model_knows_nothing_of_it(saved, tmp_path, on_gpu):
    model = on_gpu(load_policy, str(saved))
    assert model.config._attn_implementation == "openppo_cuda"
    model.save_pretrained(tmp_path / "again")
    assert "openppo" not in (tmp_path / "again" / "config.json").read_text()
