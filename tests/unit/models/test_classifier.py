"""Critics and reward models where transformers has no classifier, against the causal language model."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CTRLConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GraniteConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    PreTrainedConfig,
)

from openppo.models import ScalarHeadModel, get_llm_for_sequence_regression
from openppo.strategy.saving import save_model

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48, "global_head_dim": 8, **SIZES}
LLAMA = {"intermediate_size_mlp": 24, "num_local_experts": 2, **SIZES}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "granite": lambda: GraniteConfig(**SIZES),
    "gemma4_text": lambda: Gemma4TextConfig(**GEMMA, num_kv_shared_layers=0, layer_types=["full_attention"] * 2),
    "llama4_text": lambda: Llama4TextConfig(**LLAMA),
    "ctrl": lambda: CTRLConfig(vocab_size=48, n_positions=64, n_embd=32, dff=24, n_layer=2, n_head=4),
}
ROWS = [[5, 9, 2, 17, 30, 8, 2], [11, 3, 2], [7, 21, 38, 4]]
WIDTH = 7
SEQUENCES = torch.tensor([row + [2] * (WIDTH - len(row)) for row in ROWS])
MASK = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in ROWS])


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    """A causal language model as it is on the hub."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]()).save_pretrained(tmp_path / "causal")
    return tmp_path / "causal"


def read_by_the_output_layer(folder, row):
    """The hidden state of each token of one row, (L, hidden), as the causal language model's output layer gets it."""
    model, seen = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([row]))
    return seen[0]


def assert_saved_alike(model, folder):
    """The folder gives the same weights back, bit for bit."""
    again = get_llm_for_sequence_regression(str(folder), "reward").model.state_dict()
    expected = model.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_saved_names_are_the_language_models_and_a_head(folder, tmp_path):
    critic: Any = get_llm_for_sequence_regression(str(folder), "critic")
    save_model(critic.model, tmp_path / "out", is_main=True)
    names, causal = (set(load_file(f / "model.safetensors")) for f in (tmp_path / "out", folder))
    assert names - causal == {"score.weight"}
    assert all(name.startswith("lm_head.") for name in causal - names)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    transformer = AutoModel.from_pretrained(tmp_path / "out").eval()  # transformers alone
    with torch.no_grad():
        hidden = transformer(input_ids=SEQUENCES[:1]).last_hidden_state[0]
        values = (hidden @ load_file(tmp_path / "out" / "model.safetensors")["score.weight"][0]).tolist()
        assert critic.eval()(SEQUENCES, MASK)[0, 1:].tolist() == pytest.approx(values[:-1], abs=2e-5)


def test_adapters_and_head_are_merged_when_read_back(folder, tmp_path):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    targets = ["q_proj", "v_proj"] if kind == "llama4_text" else "all-linear"  # its router is a layer of another kind
    options = {"init_value_head": True, "lora_rank": 2, "target_modules": targets}
    adapted = get_llm_for_sequence_regression(str(folder), "reward", **options)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    save_model(adapted.model, tmp_path / "out", is_main=True)
    merged = get_llm_for_sequence_regression(str(tmp_path / "out"), "reward").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(SEQUENCES, MASK), adapted.eval()(SEQUENCES, MASK), rtol=0, atol=1e-4)


def with_images(kind):
    """A model of images and text, whose language model is that of ``FAMILIES``."""
    text = FAMILIES[f"{kind}_text"]().to_dict()
    if kind == "gemma4":
        vision = {**VISION, "num_key_value_heads": 2, "head_dim": 8}
        return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, audio_config=None))
    vision = {**VISION, "image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16}
    return Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))


@pytest.mark.parametrize("kind", ["gemma4", "llama4"])
def test_a_checkpoint_of_images_and_text_gives_a_critic_too(kind, tmp_path):
    torch.manual_seed(4)
    with_images(kind).save_pretrained(tmp_path / "hub")
    critic: Any = get_llm_for_sequence_regression(str(tmp_path / "hub"), "critic").eval()
    head = critic.classifier.score.weight[0].detach()
    with torch.no_grad():
        values = critic(SEQUENCES, MASK)[0].tolist()
    expected = [0.0, *(read_by_the_output_layer(tmp_path / "hub", ROWS[0]) @ head).tolist()[:-1]]
    assert values == pytest.approx(expected, abs=2e-5)
    save_model(critic.model, tmp_path / "out", is_main=True)
    assert_saved_alike(critic.model, tmp_path / "out")


def test_a_family_with_a_classifier_keeps_that_of_transformers(llama_folder):
    critic = get_llm_for_sequence_regression(str(llama_folder), "critic")
    assert isinstance(critic, ScalarHeadModel)
    assert critic.classifier.__class__.__module__ == "transformers.models.llama.modeling_llama"
    assert "causal" not in vars(type(critic.classifier))
