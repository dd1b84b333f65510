"""Samples without padding: the same log-probs, values, scores and gradients as with it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, LlamaConfig, Qwen2Config

from openppo.models.actor import Actor
from openppo.models.scalar_head import ScalarHeadModel
from openppo.trainer.supervised.batches import pack_where_exact

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 11, "initializer_range": 0.5, "pad_token_id": 0}
CONFIGS = [
    LlamaConfig(**COMMON, **SIZES, num_key_value_heads=2, num_labels=1),
    Qwen2Config(**COMMON, **SIZES, num_key_value_heads=2, num_labels=1),
    GPT2Config(**COMMON, n_embd=16, n_layer=2, n_head=2, num_labels=1),
]
LENGTHS = torch.tensor([7, 2, 5, 7, 1])


@pytest.fixture
def batch():
    """Sequences, attention mask and an action mask with holes, (5, 7); one row has no action."""
    sequences = torch.randint(1, 11, (5, 7), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.arange(7) < LENGTHS[:, None]
    action_mask = attention_mask & (torch.arange(7) >= 1) & (torch.arange(7) != 4)
    action_mask[1] = False
    return torch.where(attention_mask, sequences, 0), attention_mask, action_mask


def both(module):
    """The module as it is, and one like it that packs."""
    packing = copy.deepcopy(module)
    pack_where_exact(packing, packing, CPU, "model")
    assert packing.packs_rows
    return [module, packing]


def gradients(module, outputs):
    """Of a sum that weighs every place differently."""
    (outputs * torch.linspace(-1, 2, outputs.numel()).view(outputs.shape)).sum().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_outputs_and_gradients_are_those_of_padded_rows(config, role, batch):
    torch.manual_seed(0)
    found = []
    if role == "actor":
        for actor in both(Actor(AutoModelForCausalLM.from_config(config), temperature=1.3)):
            log_probs, entropy = actor(*batch, return_entropy=True)
            found.append((log_probs, entropy, actor(*batch[:2]), gradients(actor, log_probs + entropy)))
    else:
        for model in both(ScalarHeadModel(AutoModelForSequenceClassification.from_config(config).eval(), role)):
            outputs = model(*batch[:2])
            outputs = torch.where(batch[1], outputs, 0.0) if role == "critic" else outputs
            found.append((outputs, gradients(model, outputs)))
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def test_a_batch_without_actions_has_log_probs_of_zero_and_a_backward_pass(batch):
    _, actor = both(Actor(AutoModelForCausalLM.from_config(CONFIGS[0])))
    log_probs = actor(*batch[:2], torch.zeros_like(batch[2]))
    assert not log_probs.any()
    assert not gradients(actor, log_probs).any()


def test_a_model_that_mixes_the_rows_stays_with_padding(caplog):
    class Mixing(Actor):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            return found + args[0].sum() if self.packs_rows else found

    actor = Mixing(AutoModelForCausalLM.from_config(CONFIGS[0]))
    pack_where_exact(actor, actor, CPU, "actor")
    assert not actor.packs_rows
    assert "samples of the actor are padded: in one row they change each other's outputs by" in caplog.text
