"""Files of users, reward functions and data loaders alike: what they may not do to the run."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openppo.config import RowsConfig
from openppo.datasets import load_mixed_rows
from openppo.user_code import call, load_callable

MEDDLES = """
    import random, numpy, torch
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
"""
EXITS = r"^--(reward_fn|dataset_class) .*user.py:make.* calls sys\.exit\(\)"


def rewards(file: Path) -> Any:
    return load_callable(f"{file}:make", "--reward_fn")


def data(file: Path) -> Any:
    return load_mixed_rows(RowsConfig(dataset_class=f"{file}:make"), "x", flag="--dataset", split="train", seed=0)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A user's file; afterwards torch is as before."""
    yield tmp_path / "user.py"
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("load", [rewards, data])
def test_an_import_changes_neither_gradients_nor_dtype_nor_seeds(load, file):
    file.write_text(f"if True:{MEDDLES}\ndef make(prompts):{MEDDLES}    return [{{'input': 'a'}}]\n")

    def draws(between: Callable[[Path], Any]) -> list[float]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        between(file)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    assert draws(load) == draws(lambda _: None)
    made = torch.zeros(())
    assert (torch.is_grad_enabled(), made.dtype, made.device.type) == (True, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("load", "text"),
    [
        *((load, f"import sys\nsys.exit({status})\n") for load in (rewards, data) for status in ("", "0", "3")),
        (data, "import sys\ndef make(source):\n    sys.exit()\n    yield {}\n"),
    ],
)
def test_sys_exit_at_import_or_in_a_data_loader_is_an_error(load, text, file):
    file.write_text(text)
    with pytest.raises(ValueError, match=EXITS):
        load(file)


def test_a_call_on_a_thread_leaves_none_behind():
    def work():
        seen.append(threading.current_thread())
        if len(seen) == 2:
            raise LookupError("lost")
        return 5

    seen: list[threading.Thread] = []
    assert asyncio.run(call(work)) == 5
    with pytest.raises(LookupError, match="lost"):
        asyncio.run(call(work))
    for thread in seen:
        thread.join(60)
    assert [thread.is_alive() for thread in seen] == [False, False] and threading.current_thread() not in seen


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit("panic")])
def test_what_a_coroutine_cannot_raise_is_an_error_of_its_call(error):
    def work():
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        asyncio.run(call(work))
