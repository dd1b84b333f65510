"""Shapes read from configs, against models that are really made."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from openppo.config import LoRAConfig
from openppo.models.adapters import add_adapters
from openppo.trainer.estimate.shapes import model_shape
from openppo.trainer.estimate.states import n_trained

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = [
    LlamaConfig(vocab_size=96, num_key_value_heads=2, **SIZES),
    LlamaConfig(vocab_size=96, tie_word_embeddings=True, **SIZES),
    Qwen2Config(vocab_size=96, num_key_value_heads=2, **SIZES),
    Qwen3Config(vocab_size=96, num_key_value_heads=2, head_dim=32, **SIZES),
    GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_are_those_of_the_real_model(config: PreTrainedConfig) -> None:
    real = AutoModelForCausalLM.from_config(config)
    sizes = [p.numel() for p in real.parameters()]
    shape = model_shape(config, "vocabulary")
    assert (shape.n_parameters, shape.largest, shape.vocabulary) == (sum(sizes), max(sizes), 96)


def test_a_critic_has_a_scalar_head() -> None:
    config = LlamaConfig(vocab_size=96, **SIZES)
    shape = model_shape(config, "scalar")
    config.num_labels = 1
    real = AutoModelForSequenceClassification.from_config(config)
    assert shape.n_parameters == sum(p.numel() for p in real.parameters())
    assert shape.vocabulary == 0


def test_the_config_is_left_as_it_was() -> None:
    config = LlamaConfig(vocab_size=96, **SIZES)
    before = config.to_dict()
    model_shape(config, "scalar")
    assert config.to_dict() == before


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("head", ["vocabulary", "scalar"])
def test_adapters_are_counted_as_peft_makes_them(targets: tuple[str, ...], head: str) -> None:
    config = Qwen2Config(vocab_size=96, num_key_value_heads=2, pad_token_id=0, **SIZES)
    shape = model_shape(config, head, targets)  # type: ignore[arg-type]
    config.num_labels = 1
    auto = AutoModelForCausalLM if head == "vocabulary" else AutoModelForSequenceClassification
    task = "CAUSAL_LM" if head == "vocabulary" else "SEQ_CLS"
    real = add_adapters(auto.from_config(config), LoRAConfig(lora_rank=4, target_modules=targets), task)  # type: ignore[arg-type]
    assert n_trained(shape, 4) == sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_gates_and_norms_are_recognized() -> None:
    shapes = [model_shape(config, "vocabulary") for config in CONFIGS]
    assert [shape.gated for shape in shapes] == [True, True, True, True, False]
    assert [shape.normed_queries for shape in shapes] == [False, False, False, True, False]
    assert [shape.composed_gelu for shape in shapes] == [False, False, False, False, True]
    assert (shapes[3].queries, shapes[3].keys) == (4 * 32, 2 * 32)


def test_no_memory_is_taken_for_a_model_of_70_billion() -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("cpu"):
        assert model_shape(config, "vocabulary").n_parameters == 70_553_706_496  # as Meta counts Llama-3.1-70B
