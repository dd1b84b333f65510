"""Weights handed over one by one, against peft's own merge; ZeRO-3 is in tests/distributed/test_lora.py."""

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from openppo.models import Actor
from openppo.strategy.trainable_model import merged_weights

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def gpt2() -> GPT2LMHeadModel:
    """Its layers keep their weights transposed, and its head is tied."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4))


def adapted(model: PreTrainedModel, **lora: Any) -> Any:
    """With adapters that change something."""
    policy = Actor(model, **{"lora_rank": 4, "lora_alpha": 12, **lora}).model
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return policy


@pytest.mark.parametrize("model", [llama(), llama(tie_word_embeddings=True), llama(attention_bias=True), gpt2()])
def test_weights_are_the_models_with_adapters_added_as_peft_merges_them(model: PreTrainedModel) -> None:
    names = [name for name, _ in model.named_parameters()]
    plain = dict(merged_weights(model))
    assert list(plain) == names
    assert all(plain[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters()), "nothing is copied"
    policy = adapted(model)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    found = dict(merged_weights(policy))
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert list(found) == names
    for name, tensor in copy.deepcopy(policy).merge_and_unload().named_parameters():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_in_bfloat16_the_sum_is_rounded_once() -> None:
    policy = adapted(llama().bfloat16(), target_modules=["q_proj"])
    exact = dict(copy.deepcopy(policy).float().merge_and_unload().named_parameters())
    for name, weight in merged_weights(policy):
        assert weight.dtype is torch.bfloat16
        if "q_proj" in name:  # half a unit in the last of 8 bits, and as much for the product of two factors
            assert ((weight.float() - exact[name]).abs() <= exact[name].abs() * 2**-8 + 1e-3).all()


def test_an_adapter_on_a_tied_weight_is_refused() -> None:
    """Merged, by whom ever, it would change the embeddings as well."""
    for target in ("lm_head", "embed_tokens"):
        with pytest.raises(
            ValueError, match=rf"--target_modules {target}: .*lm_head.*embed_tokens|embed_tokens.*lm_head"
        ):
            adapted(llama(tie_word_embeddings=True), target_modules=[target])
    adapted(llama(), target_modules=["lm_head"])
