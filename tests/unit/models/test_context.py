"""Rows up to the context that we take are read alike whatever lies beside them, also where positions are rescaled."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Phi3Config, Phi3ForCausalLM
from transformers import Phi3ForSequenceClassification as Phi3Classifier

from openppo.models import Actor, ScalarHeadModel
from openppo.models.pretrained import context_length

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS: dict[str, Any] = {"vocab_size": 40, "initializer_range": 0.2, "pad_token_id": 0, "num_labels": 1, **SIZES}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}


def dynamic():
    return LlamaConfig(**OPTIONS, max_position_embeddings=16, rope_parameters=DYNAMIC)


def longrope():
    options = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    return Phi3Config(**OPTIONS, **options, rope_parameters=LONG)


def beside(model, row, n):
    """What is read of ``row`` in a batch with a row of ``n`` tokens."""
    width = max(n, len(row))
    ids, mask = torch.full((2, width), 7), torch.zeros(2, width, dtype=torch.bool)
    ids[0, : len(row)], mask[0, : len(row)], mask[1, :n] = torch.tensor(row), True, True
    with torch.no_grad():
        return model(ids, mask)[0].flatten()[: len(row)]


@pytest.mark.parametrize(
    ("config", "causal", "classifier"),
    [(dynamic, LlamaForCausalLM, LlamaForSequenceClassification), (longrope, Phi3ForCausalLM, Phi3Classifier)],
    ids=["dynamic", "longrope"],
)
@pytest.mark.parametrize("role", ["policy", "critic", "reward"])
def test_a_row_is_read_alike_beside_any_that_fits(config, causal, classifier, role):
    torch.manual_seed(2)
    model = Actor(causal(config()).eval()) if role == "policy" else ScalarHeadModel(classifier(config()).eval(), role)
    row, context = [3, 9, 4, 17, 30, 8], context_length(config())
    assert context == 16
    alone = beside(model, row, 2)
    torch.testing.assert_close(beside(model, row, context), alone, rtol=0, atol=1e-5)
    assert (beside(model, row, 2 * context) - alone).abs().max() > 1e-3
