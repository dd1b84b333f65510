"""Files of users, reward functions and data loaders alike: what they may not do to the run."""

import asyncio
import random
import sys
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
    return load_mixed_rows(
        RowsConfig(dataset_class=f"{file}:make"), "x", flag="--dataset", split="train", seed=0
    )


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A user's file; afterwards torch is as before."""
    yield tmp_path / "user.py"
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("load", [rewards, data])
def test_an_import_changes_neither_gradients_nor_dtype_nor_seeds(load, file):
    file.write_text(
        f"if True:{MEDDLES}\ndef make(prompts):{MEDDLES}    return [{{'input': 'a'}}]\n"
    )

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
        *(
            (load, f"import sys\nsys.exit({status})\n")
            for load in (rewards, data)
            for status in ("", "0", "3")
        ),
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
    assert [thread.is_alive() for thread in seen] == [
        False,
        False,
    ] and threading.current_thread() not in seen


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit("panic")])
def test_what_a_coroutine_cannot_raise_is_an_error_of_its_call(error):
    def work():
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        asyncio.run(call(work))


@pytest.fixture
def forget() -> Iterator[None]:
    """Modules and folders that a test imports from are forgotten after it."""
    modules, path = {*sys.modules}, list(sys.path)
    yield
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        del sys.modules[name]


LOADS = {
    "at the top": "from beside_it import double\ndef make(x): return double(x)\n",
    "in the function": "def make(x):\n    from beside_it import double\n    return double(x)\n",
    "a package": "from packed.part import double\ndef make(x): return double(x)\n",
    "through another": "import relay\ndef make(x): return relay.double(x)\n",
}


def write_helpers(folder: Path) -> Path:
    """Files of a project beside one that a flag names."""
    (folder / "packed").mkdir(parents=True)
    (folder / "packed" / "__init__.py").touch()
    for name in ("beside_it.py", "packed/part.py"):
        (folder / name).write_text("def double(x): return 2 * x\n")
    (folder / "relay.py").write_text("from beside_it import double\n")
    return folder / "user.py"


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("flag", ["--reward_fn", "--agent", "--environment", "--dataset_class"])
def test_a_file_imports_modules_beside_it(flag, kind, tmp_path, forget):
    file = write_helpers(tmp_path / "project")
    file.write_text(LOADS[kind])
    assert load_callable(f"{file}:make", flag)(4) == 8
    assert load_callable(f"{file}:make", flag)(4) == 8, "and again"


@pytest.mark.parametrize("kind", LOADS)
def test_two_modules_of_one_name_beside_two_files_are_an_error(kind, tmp_path, forget):
    files = [write_helpers(tmp_path / name) for name in ("first", "second")]
    for file in files:
        file.write_text(LOADS[kind])
    load_callable(f"{files[0]}:make", "--reward_fn")
    name = (
        "packed" if kind == "a package" else "beside_it" if kind != "through another" else "relay"
    )
    says = (
        rf"^--eval_reward_fn .*second/user.py.*imports {name}, .*second and in .*first. Rename one"
    )
    with pytest.raises(ValueError, match=says):
        load_callable(f"{files[1]}:make", "--eval_reward_fn")


def test_a_module_beside_a_file_hides_no_installed_one(tmp_path, forget, caplog):
    (tmp_path / "colorsys.py").write_text("rgb_to_hsv = None\n")
    (tmp_path / "user.py").write_text("from colorsys import rgb_to_hsv as make\n")
    assert load_callable(f"{tmp_path}/user.py:make", "--reward_fn")(0, 0, 0) == (0, 0, 0)
    (line,) = caplog.messages
    assert (
        line.startswith("--reward_fn")
        and "imports colorsys" in line
        and "not the file beside it" in line
    )
