"""Files of users, reward functions and data loaders alike: what they may not do to the run."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openppo.config import RowsConfig
from openppo.datasets import load_mixed_rows
from openppo.rewards import load_reward_function

MEDDLES = """
import random, numpy, torch
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
"""


def rewards(file: Path) -> Any:
    return load_reward_function(f"{file}:make", ())


def data(file: Path) -> Any:
    return load_mixed_rows(RowsConfig(dataset_class=f"{file}:make"), "x", flag="--dataset", split="train", seed=0)


both = pytest.mark.parametrize("load", [rewards, data])


@pytest.fixture
def _torch_as_before() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@both
@pytest.mark.usefixtures("_torch_as_before")
def test_an_import_changes_neither_gradients_nor_dtype_nor_seeds(load: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "meddles.py"
    body = MEDDLES.strip().replace("\n", "\n    ")
    file.write_text(f"{MEDDLES}\ndef make(prompts):\n    {body}\n    return [{{'input': 'a'}}]\n")

    def draws() -> list[float]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    load(file)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected
    assert torch.is_grad_enabled()
    assert torch.zeros(()).dtype == torch.float32
    assert torch.zeros(()).device.type == "cpu"


@both
@pytest.mark.parametrize("status", ["", "0", "3"])
def test_sys_exit_at_import_is_an_error(status: str, load: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(f"import sys\nsys.exit({status})\n")
    with pytest.raises(ValueError, match=r"^--(reward_fn|dataset_class) .*leaves.py:make.* calls sys\.exit\(\)"):
        load(file)


def test_sys_exit_in_a_data_loader_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text("import sys\ndef make(source):\n    sys.exit()\n    yield {}\n")
    with pytest.raises(ValueError, match=r"^--dataset_class .*leaves.py:make.* calls sys\.exit\(\)"):
        data(file)
