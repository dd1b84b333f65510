"""Critics of every causal family: the head on what the language model's output layer reads, and saved weights alike."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from openppo.models import get_llm_for_sequence_regression
from openppo.models.size import model_size
from openppo.strategy.saving import save_model
from tests.architectures import NAMES, tiny_config

OTHER_HEADS = tuple(
    """
    bart big_bird bigbird_pegasus camembert data2vec-text mbart mvp plbart
    roberta roberta-prelayernorm roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """.split()
)
"""Encoders, and decoders with an encoder, whose classifier in transformers has a head of another kind."""
ELSEWHERE = tuple(
    "bert electra ernie megatron-bert rembert modernbert-decoder inkling_text minicpm3 prophetnet cpmant".split()
)
"""Their output layer reads a multiple of the hidden states, or what another layer makes of them, or the whole batch."""
FEW = ("granite", "cohere", "olmoe", "gemma4_text", "llama4_text", "ctrl", "bart")
PARAMS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in NAMES]
ROWS = [[5, 9, 2, 17, 30, 8, 11, 44, 2], [11, 3, 2, 60]]


def read_by_output_layer(model, row):
    """The hidden state of each token, (L, hidden)."""
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([row]), use_cache=False)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", PARAMS)
def test_a_critic_reads_what_the_language_model_reads(name, tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(tmp_path / "causal")
    if name in OTHER_HEADS:
        with pytest.raises(ValueError, match="keeps no linear head named 'score'"):
            get_llm_for_sequence_regression(str(tmp_path / "causal"), "critic")
        return
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "causal").eval()
    critic: Any = get_llm_for_sequence_regression(str(tmp_path / "causal"), "critic").eval()
    width = max(map(len, ROWS))
    sequences = torch.tensor([row + [2] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in ROWS])
    with torch.no_grad():
        values = critic(sequences, mask)
    head = critic.classifier.score.weight[0].detach()
    for b, row in enumerate(ROWS if name not in ELSEWHERE else []):
        expected = [0.0, *(read_by_output_layer(causal, row) @ head).tolist()[:-1]]
        assert values[b, : len(row)].tolist() == pytest.approx(expected, abs=1e-4)
    save_model(critic.model, tmp_path / "out", is_main=True)
    before = critic.model.state_dict()
    after = get_llm_for_sequence_regression(str(tmp_path / "out"), "reward").model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert model_size(causal.config, scalar=True).n_parameters == sum(p.numel() for p in critic.parameters())
