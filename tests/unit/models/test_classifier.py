"""Critics of every causal family: the head on what the output layer reads, and saved weights alike; sizes of models."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GPT2Config,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from openppo.config import LoRAConfig
from openppo.models import get_llm_for_sequence_regression
from openppo.models.adapters import add_adapters
from openppo.models.size import cache_elements, model_size
from openppo.strategy.saving import save_model
from openppo.types import ModelInputs
from tests.architectures import NAMES, tiny_config

OTHER_HEADS = tuple(
    """
    bart bert big_bird bigbird_pegasus camembert ctrl data2vec-text electra ernie mbart megatron-bert modernbert-decoder
    mvp plbart rembert roberta roberta-prelayernorm roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """.split()
)
"""Encoders, and decoders with an encoder, whose classifier in transformers has a head of another kind."""
ELSEWHERE = ("inkling_text", "minicpm3", "prophetnet", "cpmant")
"""Their output layer reads a multiple of the hidden states, or what another layer makes of them, or the whole batch."""
FEW = ("granite", "cohere", "olmoe", "gemma4_text", "llama4_text", "ctrl", "bart")
PARAMS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in NAMES]
ROWS = [[5, 9, 2, 17, 30, 8, 11, 44, 2], [11, 3, 2, 60]]
SEQUENCES = torch.tensor([ROWS[0], ROWS[1] + [2] * 5])
MASK = torch.arange(9) < torch.tensor([[9], [4]])


def read_by_output_layer(model, row):
    """The hidden state of each token, (L, hidden)."""
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0][0])
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([row]), use_cache=False)
    hook.remove()
    return seen[0]


def check_critic(critic, causal, out, rows=ROWS):
    """It reads what the language model's output layer reads; its saved weights are read back bit for bit."""
    with torch.no_grad():
        values = critic.eval()(ModelInputs(SEQUENCES, MASK))
    head = critic.classifier.score.weight[0].detach()
    for b, row in enumerate(rows):
        expected = [0.0, *(read_by_output_layer(causal, row) @ head).tolist()[:-1]]
        assert values[b, : len(row)].tolist() == pytest.approx(expected, abs=1e-4)
    save_model(critic.model, out, is_main=True)
    before = critic.model.state_dict()
    after = get_llm_for_sequence_regression(str(out), "reward").model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", PARAMS)
def test_a_critic_reads_what_the_language_model_reads(name, tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(tmp_path / "causal")
    if name in OTHER_HEADS:
        with pytest.raises(ValueError, match="keeps no linear head named 'score'"):
            get_llm_for_sequence_regression(str(tmp_path / "causal"), "critic")
        return
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "causal").eval()
    critic: Any = get_llm_for_sequence_regression(str(tmp_path / "causal"), "critic")
    check_critic(critic, causal, tmp_path / "out", [] if name in ELSEWHERE else ROWS)
    assert model_size(causal.config, scalar=True).n_parameters == sum(
        p.numel() for p in critic.parameters()
    )


@pytest.mark.parametrize("name", ["granite", "gemma4_text", "llama4_text"])
def test_transformers_reads_a_saved_critic_and_adapters_are_merged(name, tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(tmp_path / "causal")
    targets = (
        ("q_proj", "v_proj") if name == "llama4_text" else ("all-linear",)
    )  # its router is of another kind
    options = {"init_value_head": True, "lora_rank": 2, "target_modules": targets}
    adapted: Any = get_llm_for_sequence_regression(str(tmp_path / "causal"), "reward", **options)
    for parameter in (p for p in adapted.parameters() if p.requires_grad):
        parameter.data.normal_(std=0.3)
    save_model(adapted.model, tmp_path / "adapters", is_main=True)
    merged: Any = get_llm_for_sequence_regression(str(tmp_path / "adapters"), "reward").eval()
    with torch.no_grad():
        scores = merged(ModelInputs(SEQUENCES, MASK))
        torch.testing.assert_close(
            scores, adapted.eval()(ModelInputs(SEQUENCES, MASK)), rtol=0, atol=2e-4
        )
    save_model(merged.model, tmp_path / "out", is_main=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    transformer = AutoModel.from_pretrained(tmp_path / "out").eval()  # transformers alone
    with torch.no_grad():
        last = transformer(input_ids=SEQUENCES[:1]).last_hidden_state[0, -1]
    head = load_file(tmp_path / "out" / "model.safetensors")["score.weight"][0]
    assert scores[0].item() == pytest.approx((last @ head).item(), abs=1e-4)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("kind", ["gemma4", "llama4"])
def test_a_checkpoint_of_images_and_text_gives_a_critic_too(kind, tmp_path):
    torch.manual_seed(4)
    text: Any = tiny_config(f"{kind}_text").to_dict()
    if kind == "gemma4":
        vision: Any = {**VISION, "num_key_value_heads": 2, "head_dim": 8}
        config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
        model: Any = Gemma4ForConditionalGeneration(config)
    else:
        vision = {
            **VISION,
            "image_size": 8,
            "patch_size": 4,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
        }
        config = Llama4Config(
            text_config=text, vision_config={**vision, "projector_output_dim": 16}
        )
        model = Llama4ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "hub")
    critic = get_llm_for_sequence_regression(str(tmp_path / "hub"), "critic")
    check_critic(
        critic, AutoModelForCausalLM.from_pretrained(tmp_path / "hub").eval(), tmp_path / "out"
    )


WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = [
    LlamaConfig(vocab_size=96, num_key_value_heads=2, **WIDTHS),
    LlamaConfig(vocab_size=96, tie_word_embeddings=True, **WIDTHS),
    Qwen2Config(vocab_size=96, num_key_value_heads=2, **WIDTHS),
    Qwen3Config(vocab_size=96, num_key_value_heads=2, head_dim=32, **WIDTHS),
    GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_and_cache_are_those_of_the_model(config: PreTrainedConfig) -> None:
    before = config.to_dict()
    size = model_size(config)
    assert config.to_dict() == before
    real = AutoModelForCausalLM.from_config(config)
    assert (size.n_parameters, size.vocabulary) == (sum(p.numel() for p in real.parameters()), 96)
    cache = DynamicCache()
    real(torch.zeros(3, 10, dtype=torch.int64), past_key_values=cache, use_cache=True)
    elements = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values))
    assert 3 * 10 * cache_elements(config) == elements


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("scalar", [False, True])
def test_a_critic_has_a_scalar_head_and_adapters_are_those_of_peft(
    targets: tuple[str, ...], scalar: bool
) -> None:
    config = Qwen2Config(vocab_size=96, num_key_value_heads=2, pad_token_id=0, **WIDTHS)
    size = model_size(config, scalar, targets)
    config.num_labels = 1
    real = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(
        config
    )
    assert (size.n_parameters, size.vocabulary) == (
        sum(p.numel() for p in real.parameters()),
        0 if scalar else 96,
    )
    lora = LoRAConfig(lora_rank=4, target_modules=targets)
    adapted = add_adapters(real, lora, "SEQ_CLS" if scalar else "CAUSAL_LM")
    assert size.n_trained(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_a_model_of_70_billion_takes_no_memory() -> None:
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    size = model_size(LlamaConfig(vocab_size=128256, **heads, **sizes))
    assert size.n_parameters == 70_553_706_496  # as Meta counts Llama-3.1-70B
    assert (
        size.n_quantized == 70_553_706_496 - 2 * 128256 * 8192 - 161 * 8192
    )  # all but embeddings, head and norms
