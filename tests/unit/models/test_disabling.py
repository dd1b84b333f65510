"""Options of a pretrained config that training cannot use are off in the model, and kept in what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from openppo.models import Actor
from openppo.strategy.saving import save_model
from tests.architectures import NAMES, tiny_config

ROWS = torch.tensor([[5, 9, 2, 17, 30, 8, 11, 44, 2], [11, 3, 2, 60, 7, 7, 7, 7, 7]])
MASK = torch.arange(9) < torch.tensor([[9], [4]])
CPU = torch.device("cpu")

RATES = ("drop", "jitter")


def every(names: list[str], *few: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in few else pytest.mark.slow) for name in names]


def same_after_saving(model: Any, folder: Path, file: str = "config.json", **expected: Any) -> None:
    """Save ``model``; its config says what is expected, and nothing that OpenPPO added."""
    save_model(model, folder, is_main=True)
    text = (folder / file).read_text()
    config = json.loads(text)
    assert {name: config.get(name) for name in expected} == expected
    assert "openppo" not in text


def rates_of(name: str) -> dict[str, float]:
    """Rates in the config of a family that make its forward random, set to a half."""
    values = tiny_config(name).to_dict()
    rates = [key for key, value in values.items() if any(word in key for word in RATES) and type(value) in (int, float)]
    return dict.fromkeys(rates, 0.5)


RANDOM = [name for name in NAMES if rates_of(name) and name not in ("diffllama", "phimoe", "trocr", "whisper")]
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
    trained = actor(ROWS, MASK)
    assert torch.equal(actor(ROWS, MASK), trained)
    torch.testing.assert_close(actor.eval()(ROWS, MASK), trained, rtol=0, atol=1e-5)
    same_after_saving(actor.model, tmp_path, **rates)
