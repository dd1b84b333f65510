"""Options of a pretrained config that training cannot use are off in the model, and kept in what is saved."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeTextConfig,
)

from openppo.config import MergeLoRAConfig
from openppo.jobs.merge_lora import LoRAMerge
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.models.attention import use_fast_attention
from openppo.models.prefixes import share_where_exact
from openppo.models.scalar_head import ScalarHeadModel, classifier_of
from openppo.models.size import model_size
from openppo.strategy.saving import save_model
from openppo.types import ModelInputs
from tests.architectures import NAMES, tiny_config

ROWS = torch.tensor([[5, 9, 2, 17, 30, 8, 11, 44, 2], [11, 3, 2, 60, 7, 7, 7, 7, 7]])
MASK = torch.arange(9) < torch.tensor([[9], [4]])
CPU = torch.device("cpu")

ROUTED = [name for name in NAMES if hasattr(tiny_config(name), "output_router_logits")]
"""Families that may return the scores of their routers."""
RATES = ("drop", "jitter")


def every(names: list[str], *few: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in names]


def saved(folder: Path, name: str, **changes: Any) -> str:
    """A folder with the tiny model ``name``, whose config.json has ``changes``."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


def same_after_saving(model: Any, folder: Path, file: str = "config.json", **expected: Any) -> None:
    """Save ``model``; its config says what is expected, and nothing that OpenPPO added."""
    save_model(model, folder, is_main=True)
    text = (folder / file).read_text()
    config = json.loads(text)
    assert {name: config.get(name) for name in expected} == expected
    assert "openppo" not in text


def shares_prompts(actor: Actor) -> bool:
    share_where_exact(actor, actor, CPU, "actor")
    shares = actor.shares_prompts
    actor.use_sharing(False)
    return shares


@pytest.mark.parametrize("name", every(ROUTED, "mixtral"))
def test_mixtures_are_read_without_router_logits(name: str, tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", name)
    routed = saved(tmp_path / "routed", name, output_router_logits=True)
    expected, actor = Actor(plain), Actor(routed)
    assert actor.model.config.output_router_logits is False
    assert torch.equal(actor(ModelInputs(ROWS, MASK)), expected(ModelInputs(ROWS, MASK)))
    assert shares_prompts(actor) == shares_prompts(expected)

    padded = actor.model(input_ids=ROWS, attention_mask=MASK.long(), use_cache=False)
    assert getattr(padded, "router_logits", None) is None

    critic: Any = get_llm_for_sequence_regression(routed, "critic")
    assert critic.classifier.config.output_router_logits is False
    critic(ModelInputs(ROWS, MASK)).sum().backward()
    for model in (actor.model, critic.model):
        same_after_saving(model, tmp_path / "out", output_router_logits=True)


def test_a_model_of_the_caller_is_read_without_router_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "openppo"):
        Actor(AutoModelForCausalLM.from_config(tiny_config("mixtral")))
        assert caplog.text == ""
        model = AutoModelForCausalLM.from_config(tiny_config("mixtral", output_router_logits=True))
        use_fast_attention(model)
        actor = Actor(model)
    assert "MixtralForCausalLM: output_router_logits is switched off" in caplog.text
    assert len(caplog.records) == 1
    assert shares_prompts(actor)
    same_after_saving(actor.model, tmp_path / "actor", output_router_logits=True)

    kind, config = classifier_of(tiny_config("mixtral", output_router_logits=True))
    critic = ScalarHeadModel(kind.from_config(config), "critic")
    critic(ModelInputs(ROWS, MASK)).sum().backward()
    same_after_saving(critic.model, tmp_path / "critic", output_router_logits=True)


def test_adapters_keep_the_config_of_their_model(tmp_path: Path) -> None:
    actor = Actor(
        saved(tmp_path / "base", "mixtral", output_router_logits=True),
        lora_rank=2,
        target_modules="q_proj",
    )
    assert shares_prompts(actor)
    same_after_saving(
        actor.model, tmp_path / "adapters", "model_config.json", output_router_logits=True
    )
    assert Actor(str(tmp_path / "adapters")).model.config.output_router_logits is False


def test_adapters_on_a_base_with_output_attentions_are_merged(tmp_path: Path) -> None:
    actor = Actor(
        saved(tmp_path / "base", "llama", output_attentions=True),
        lora_rank=2,
        target_modules="q_proj",
    )
    same_after_saving(
        actor.model, tmp_path / "adapters", "model_config.json", output_attentions=True
    )
    LoRAMerge(
        MergeLoRAConfig(lora_path=str(tmp_path / "adapters"), save_path=str(tmp_path / "merged"))
    ).fit()
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["output_attentions"] is True
    )


def test_a_mixture_inside_a_model_of_images_is_read_without_router_logits(tmp_path: Path) -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    text = tiny_config("qwen3_vl_moe_text", rope_parameters=rope, output_router_logits=True)
    assert isinstance(text, Qwen3VLMoeTextConfig)
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text.to_dict(), vision_config=vision)
    actor = Actor(Qwen3VLMoeForConditionalGeneration(config))
    assert actor.model(input_ids=ROWS, attention_mask=MASK.long()).router_logits is None

    save_model(actor.model, tmp_path, is_main=True)
    assert (
        json.loads((tmp_path / "config.json").read_text())["text_config"]["output_router_logits"]
        is True
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("return_dict", False), ("output_attentions", True), ("output_hidden_states", True)],
)
def test_other_options_of_outputs_are_off_and_kept(name: str, value: bool, tmp_path: Path) -> None:
    """With ``output_attentions`` transformers refuses to write the config of a model without eager attention."""
    expected = Actor(saved(tmp_path / "plain", "llama"))(ModelInputs(ROWS, MASK))
    changed = saved(tmp_path / "changed", "llama", **{name: value})
    actor, critic = Actor(changed), get_llm_for_sequence_regression(changed, "critic")
    assert torch.equal(actor(ModelInputs(ROWS, MASK)), expected)
    assert actor.ends_in_head
    critic(ModelInputs(ROWS, MASK)).sum().backward()
    same_after_saving(actor.model, tmp_path / "out", **{name: value})


def test_sizes_are_those_of_a_model_that_returns_logits_alone() -> None:
    config = tiny_config("llama", return_dict=False)
    assert model_size(config).whole_logits is False
    assert config.return_dict is False


def rates_of(name: str) -> dict[str, float]:
    """Rates in the config of a family that make its forward random, set to a half."""
    values = tiny_config(name).to_dict()
    rates = [
        key
        for key, value in values.items()
        if any(word in key for word in RATES) and type(value) in (int, float)
    ]
    return dict.fromkeys(rates, 0.5)


RANDOM = [
    name
    for name in NAMES
    if rates_of(name) and name not in ("diffllama", "phimoe", "trocr", "whisper")
]
"""Without DiffLlama, which refuses dropout, Phi-MoE, whose noise is a margin (see ``test_loading.py``), and two whose
forward fails with or without dropout (see ``test_engine_check.py``)."""


@torch.no_grad()
@pytest.mark.parametrize("name", every(RANDOM, "persimmon"))
def test_dropout_is_off_wherever_its_rate_is_read(name: str, tmp_path: Path) -> None:
    """In modules, attributes of modules, and the config: Persimmon and Falcon read it there in each forward."""
    rates = rates_of(name)
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(name, **rates))
    actor = Actor(model).train()
    trained = actor(ModelInputs(ROWS, MASK))
    assert torch.equal(actor(ModelInputs(ROWS, MASK)), trained)
    torch.testing.assert_close(actor.eval()(ModelInputs(ROWS, MASK)), trained, rtol=0, atol=1e-5)
    same_after_saving(actor.model, tmp_path, **rates)
