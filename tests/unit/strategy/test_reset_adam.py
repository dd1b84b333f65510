"""After ``reset_adam`` updates are those of a freshly built Adam. On two ranks: tests/distributed/test_engine.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.config import AdamConfig, DeepSpeedConfig, LoRAConfig
from openppo.models.adapters import add_adapters
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.checkpoint.model_state import (
    FragmentReader,
    load_model_state,
    model_fragments,
    model_numbers,
    write_fragments,
)
from openppo.strategy.trainable_model import TrainableModel

SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
ADAM = AdamConfig(l2=0.1, adam_betas=(0.9, 0.95))
WHERE = ["device", "host while idle", "--adam_offload"]


def module_of(lora: bool) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))
    for parameter in model.parameters():
        parameter.data *= 0.5  # all below 1, where float32 is finer than 1e-7
    return add_adapters(model, LoRAConfig(lora_rank=2), "CAUSAL_LM") if lora else model


def prepared(stage: int, lora: bool, where: str) -> TrainableModel:
    config = DeepSpeedConfig(zero_stage=stage, max_norm=0.0, adam_offload=where == "--adam_offload")
    return DeepspeedStrategy(config).prepare(
        module_of(lora), ADAM, learning_rate=1e-2, total_steps=10
    )


def loss_of(model: Any, number: int) -> Tensor:
    ids = torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(number))
    return model(input_ids=ids).logits.square().mean()


def update(model: TrainableModel, number: int) -> None:
    model.backward(loss_of(model, number), last=True)
    model.step()


def weights_of(model: TrainableModel) -> dict[str, Tensor]:
    with model.gathered():
        return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def resumed(model: TrainableModel, folder: Path, *arguments: Any) -> TrainableModel:
    """Another model, with the state that a checkpoint of this one holds."""
    write_fragments(folder / "fragments", model_fragments(model))
    other = prepared(*arguments)
    with FragmentReader([folder / "fragments"]) as reader:
        load_model_state(other, reader, model_numbers(model))
    return other


def differences(model: TrainableModel, plain: nn.Module) -> list[float]:
    """Largest difference of a weight after each of two updates, of ``plain`` by a new AdamW from the same weights."""
    parameters = dict(plain.named_parameters())
    for name, weight in weights_of(model).items():
        parameters[name].data.copy_(weight)
    trained = [p for p in plain.parameters() if p.requires_grad]
    fresh, found = torch.optim.AdamW(trained, betas=ADAM.adam_betas, weight_decay=ADAM.l2), []
    for number in (10, 11):
        fresh.param_groups[0]["lr"] = model.learning_rate
        fresh.zero_grad()
        loss_of(plain, number).backward()
        fresh.step()
        update(model, number)
        pairs = [(weight, parameters[name]) for name, weight in weights_of(model).items()]
        found.append(max((one - other).abs().max().item() for one, other in pairs))
    return found


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("stage", "where"),
    [(s, where) for where in WHERE for s in (0, 1, 2, 3) if s > 0 or where != "--adam_offload"],
)
def test_updates_after_a_reset_are_those_of_a_fresh_adam(stage, where, lora, tmp_path):
    plain, model = copy.deepcopy(module_of(lora)), prepared(stage, lora, where)
    for number in range(3):
        update(model, number)
    schedule = model.learning_rate, model.scheduler.last_epoch
    if where == "host while idle":
        model.offload_adam_moments()
    model.reset_adam()
    for one in (resumed(model, tmp_path, stage, lora, where), model):
        one.load_adam_moments()
        assert (one.learning_rate, one.scheduler.last_epoch) == schedule
        assert max(differences(one, plain)) <= 1e-7


def test_without_a_reset_they_are_others_and_before_any_step_it_changes_nothing():
    used, unused = (prepared(2, False, "device") for _ in range(2))
    update(used, 0)
    assert max(differences(used, module_of(False))) > 1e-4
    unused.reset_adam()
    assert max(differences(unused, module_of(False))) <= 1e-7
