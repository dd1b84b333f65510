"""Attention in blocks is attention: the outputs and gradients of torch's own, for any length and grouping of heads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from openppo.models import attention
from openppo.models.attention import causal_attention
from openppo.models.loading import load_causal_lm

SCALE = 0.3


def heads(rows, queries, keys, length, width, dtype):
    """Queries, keys and values as models hand them over: views of (B, L, H, D)."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(rows, length, n, width, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for n in (queries, keys, keys)
    ]


def of_torch(query, key, value):
    """(B, L, H, D)"""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALE, enable_gqa=query.shape[1] != key.shape[1]
    ).transpose(1, 2)


def outputs_and_gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


@pytest.mark.parametrize("length", [2, 31, 128, 129, 300])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (4, 1)])
def test_outputs_and_gradients_are_those_of_torch(length, queries, keys):
    inputs = heads(3, queries, keys, length, 8, torch.float32)
    ours = outputs_and_gradients(causal_attention(*inputs, SCALE, True)[0], inputs)
    theirs = outputs_and_gradients(of_torch(*inputs), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


def test_pieces_of_a_batch_change_nothing(monkeypatch):
    inputs = heads(5, 4, 2, 40, 8, torch.float64)
    whole = outputs_and_gradients(causal_attention(*inputs, SCALE, True)[0], inputs)
    monkeypatch.setattr(attention, "_BLOCK", 7)
    monkeypatch.setattr(attention, "_SCORES", 4 * 7 * 40 * 2)  # two rows at a time, and one is left
    pieces = outputs_and_gradients(causal_attention(*inputs, SCALE, True)[0], inputs)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.fixture
def plain_cpu(monkeypatch):
    """A machine without GPU and AMX."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.mark.usefixtures("plain_cpu")
def test_weights_are_kept_for_the_backward_pass_only():
    inputs = heads(2, 4, 2, 128, 8, torch.float32)
    assert len(causal_attention(*inputs, SCALE, False)[1]) == 0
    kept = causal_attention(*inputs, SCALE, True)[1]
    assert len(kept) < 2 * 4 * 128 * 128
    used = kept.detach()[: 2 * 4 * (64 * 64 + 64 * 128)].view(-1, 64)
    assert len(kept) == used.numel(), "two blocks of 64 queries"


@pytest.fixture
def saved(tmp_path, plain_cpu):
    """A Llama with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def torch_attention(monkeypatch):
    """Of each call of torch's own attention."""
    called: list[torch.dtype] = []
    sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention

    def noted(query, *rest, **options):
        called.append(query.dtype)
        return sdpa(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return called


def attend(model, inputs, mask, **asked):
    """As transformers calls it."""
    attention = AttentionInterface()[model.config._attn_implementation]
    return attention(model.model.layers[0].self_attn, *inputs, mask, scaling=SCALE, **asked)[0]


def test_models_in_bfloat16_are_about_as_exact_with_it(saved, torch_attention):
    ours = load_causal_lm(str(saved), bf16=True, flash_attn=False)
    plain = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    exact = LlamaForCausalLM.from_pretrained(saved)
    for mine, theirs in zip(exact.parameters(), ours.parameters(), strict=True):
        mine.data.copy_(theirs.data)  # rounded to bfloat16
    ids = torch.randint(0, 50, (3, 20))
    gradients, outputs = [], []
    for model in (ours, plain, exact):
        logits = model(input_ids=ids).logits.float()
        logits.logsumexp(-1).sum().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
        outputs.append(logits.detach())
    assert torch_attention == [torch.bfloat16] * 2 + [torch.float32] * 2, "not of the first model"
    for mine, other, truth in (outputs, gradients):
        assert (mine - truth).norm() <= 1.2 * (other - truth).norm()


def test_what_is_not_causal_over_all_tokens_goes_to_torch(saved, torch_attention):
    """In float32 where prompts are padded; as it is in decode steps, whose caches would be converted."""
    model = load_causal_lm(str(saved), bf16=True, flash_attn=False)
    ids, mask = torch.randint(0, 50, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert torch_attention == []
    model(input_ids=ids[:, :1], past_key_values=cache)
    assert torch_attention == [torch.bfloat16] * 2
    mask[0, :5] = 0
    model(input_ids=ids, attention_mask=mask)
    assert torch_attention == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("asked", [{"is_causal": False}, {"dropout": 0.5}, {"position_bias": torch.zeros(1, 4, 1, 20)}])
@pytest.mark.parametrize("bf16", [True, False])
def test_what_more_is_asked_for_goes_to_torch(saved, torch_attention, asked, bf16):
    model = load_causal_lm(str(saved), bf16=bf16, flash_attn=False)
    query, key, value = heads(2, 4, 2, 20, 16, torch.bfloat16 if bf16 else torch.float32)
    attend(model, [query if bf16 else query[:, :, :1], key, value], None, **asked)
    assert torch_attention == ([] if not bf16 and "is_causal" in asked else [torch.float32])


@pytest.mark.parametrize(("amx", "limit"), [(False, "_LONGEST"), (True, "_LONGEST_WITH_AMX")])
def test_long_rows_go_to_torch_whose_attention_keeps_no_weights(saved, torch_attention, monkeypatch, amx, limit):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(attention, limit, 20)
    model = load_causal_lm(str(saved), bf16=True, flash_attn=False)
    model(input_ids=torch.zeros(3, 20, dtype=torch.int64))
    assert torch_attention == []
    model(input_ids=torch.zeros(3, 21, dtype=torch.int64))
    assert torch_attention == [torch.bfloat16 if amx else torch.float32] * 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (4, 1)])
def test_decode_steps_in_float32_are_those_of_torch(saved, torch_attention, queries, keys, masked):
    """Over keys and values that are a part of larger buffers, as in the engine's cache."""
    model = load_causal_lm(str(saved), bf16=False, flash_attn=False)
    torch.manual_seed(0)
    buffers = torch.randn(2, 5, keys, 30, 8)
    inputs = [torch.randn(5, 1, queries, 8).transpose(1, 2), *buffers[:, :4, :, 3:20]]
    inputs[0] = inputs[0][:4]
    mask = torch.arange(17)[None, None, None] >= torch.tensor([0, 3, 16, 5])[:, None, None, None]  # (B, 1, 1, L)
    ours = attend(model, inputs, mask if masked else None)
    assert torch_attention == []
    theirs = F.scaled_dot_product_attention(
        *inputs, attn_mask=mask if masked else None, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_in_float32_is_what_it_was_with_torch_alone(saved, torch_attention):
    ours = load_causal_lm(str(saved), bf16=False, flash_attn=False)
    plain = LlamaForCausalLM.from_pretrained(saved)
    ids, mask = torch.randint(0, 50, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :5] = 0
    outputs = []
    for model in (ours, plain):
        read = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        decoded = model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=read.past_key_values)
        outputs.append((read.logits[1:], decoded.logits))
    assert torch.equal(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-5, atol=1e-5)
    assert torch_attention == [torch.float32] * (2 + 4), "of the first model, when it reads only"


@pytest.mark.parametrize("bf16", [False, True])
def test_models_are_compiled_in_one_piece(saved, bf16):
    model = load_causal_lm(str(saved), bf16=bf16, flash_attn=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(0, 50, (3, 20))
    torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_saved_model_knows_nothing_of_it(saved, tmp_path, bf16):
    model = load_causal_lm(str(saved), bf16=bf16, flash_attn=False)
    assert model.config._attn_implementation == "openppo_cpu"
    model.save_pretrained(tmp_path / "again")
    assert "openppo" not in (tmp_path / "again" / "config.json").read_text()
