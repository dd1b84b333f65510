"""Tiny causal models with weights large enough that every token and position matters."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB = 40


def make_llama(**changes):
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    options = {
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "pad_token_id": None,
        **sizes,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**options))


def make_gpt2(**changes):
    torch.manual_seed(1)
    options = {
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        **changes,
    }
    return GPT2LMHeadModel(GPT2Config(**{"bos_token_id": 2, "eos_token_id": 2, **options}))


@pytest.fixture
def llama():
    """Builds a tiny Llama; keywords change its config."""
    return make_llama


@pytest.fixture
def gpt2():
    """Builds a tiny GPT-2 (dropout 0.1 in its config); keywords change its config."""
    return make_gpt2


@pytest.fixture(params=[make_llama, make_gpt2], ids=["llama", "gpt2"])
def any_causal(request):
    """Builds a tiny Llama in one run of the test, a tiny GPT-2 in another."""
    return request.param


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A folder with a tiny Llama as a user would have it."""
    folder = tmp_path_factory.mktemp("llama")
    make_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def edited(tmp_path):
    """Copies the folder of a model or of adapters with other weights, and another config."""

    def edit(source, change=dict, **config):
        folder = shutil.copytree(source, tmp_path / "edited", dirs_exist_ok=True)
        (weights,), (described,) = folder.glob("*.safetensors"), folder.glob("*config.json")
        changed = {name: w.contiguous() for name, w in change(load_file(weights)).items()}
        save_file(changed, weights, metadata={"format": "pt"})
        described.write_text(json.dumps({**json.loads(described.read_text()), **config}))
        return str(folder)

    return edit
