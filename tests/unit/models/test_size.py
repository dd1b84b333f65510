"""Sizes counted from configs, against models that are really made."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from openppo.config import LoRAConfig
from openppo.models.adapters import add_adapters
from openppo.models.size import cache_elements, model_size
from openppo.rollout.row_cache import SLACK_COLUMNS, RowCache

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = [
    LlamaConfig(vocab_size=96, num_key_value_heads=2, **SIZES),
    LlamaConfig(vocab_size=96, tie_word_embeddings=True, **SIZES),
    Qwen2Config(vocab_size=96, num_key_value_heads=2, **SIZES),
    Qwen3Config(vocab_size=96, num_key_value_heads=2, head_dim=32, **SIZES),
    GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_and_cache_are_those_of_the_model(config: PreTrainedConfig) -> None:
    before = config.to_dict()
    size = model_size(config)
    assert config.to_dict() == before
    real = AutoModelForCausalLM.from_config(config)
    assert (size.n_parameters, size.vocabulary) == (sum(p.numel() for p in real.parameters()), 96)
    cache, prompts = RowCache(2, 64), DynamicCache()
    real(torch.zeros(3, 10, dtype=torch.int64), past_key_values=prompts, use_cache=True)
    cache.reserve(3, 20)
    cache.enter(prompts, range(3), [10] * 3)
    elements = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values))
    assert 3 * (20 + SLACK_COLUMNS) * cache_elements(config) == elements


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("scalar", [False, True])
def test_a_critic_has_a_scalar_head_and_adapters_are_those_of_peft(targets: tuple[str, ...], scalar: bool) -> None:
    config = Qwen2Config(vocab_size=96, num_key_value_heads=2, pad_token_id=0, **SIZES)
    size = model_size(config, scalar, targets)
    config.num_labels = 1
    real = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(config)
    assert (size.n_parameters, size.vocabulary) == (sum(p.numel() for p in real.parameters()), 0 if scalar else 96)
    lora = LoRAConfig(lora_rank=4, target_modules=targets)
    adapted = add_adapters(real, lora, "SEQ_CLS" if scalar else "CAUSAL_LM")
    assert size.n_trained(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_a_model_of_70_billion_takes_no_memory() -> None:
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    size = model_size(LlamaConfig(vocab_size=128256, **heads, **sizes))
    assert size.n_parameters == 70_553_706_496  # as Meta counts Llama-3.1-70B
    assert size.n_quantized == 70_553_706_496 - 2 * 128256 * 8192 - 161 * 8192  # all but embeddings, head and norms
