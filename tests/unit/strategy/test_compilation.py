"""Compiled layers: where they are the default, what they need, what the log says, where compiled code is kept."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from openppo.build.summary import model_role
from openppo.config import AdamConfig, DeepSpeedConfig, TrainSFTConfig, from_options
from openppo.strategy import DeepspeedStrategy, compilation
from openppo.strategy import deepspeed as strategies
from openppo.strategy.compilation import compile_layers, compiles_by_default, missing_tool, obstacle
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.resume.compatible import check_compatible

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Named(nn.Module):
    """A module that names its layers, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self._no_split_modules = ["Linear"]
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tool is there, and nothing has named a folder or compiler."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for name in ("CC", "CXX", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--compile auto`` decides as on a GPU."""
    monkeypatch.setattr(strategies, "compiles_by_default", lambda device: True)


def prepared(module: nn.Module, **options: Any) -> tuple[DeepspeedStrategy, nn.Module]:
    """The strategy of these options, and ``module`` after it was prepared for training."""
    strategy = DeepspeedStrategy(DeepSpeedConfig(**options))
    return strategy, strategy.prepare(module, AdamConfig(), 1e-3, total_steps=1).module


def test_gpus_alone_compile_by_default():
    assert compiles_by_default(CUDA)
    assert not compiles_by_default(CPU)
    assert not DeepspeedStrategy(DeepSpeedConfig()).compiles


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"zero_stage": 3}, "torch.compile does not see how --zero_stage 3 gathers weights"),
        ({"deterministic": True}, "--deterministic needs the same kernels in every run"),
        ({}, ""),
    ],
)
def test_options_that_stand_against_compiling_are_named(options, reason):
    assert obstacle(DeepSpeedConfig(**options), CUDA) == reason


@pytest.mark.parametrize(
    ("device", "there", "words"),
    [
        (CUDA, (), "a C compiler, and there is none (gcc or clang)"),
        (CUDA, ("clang",), ""),
        (CPU, ("gcc", "clang"), "a C++ compiler, and there is none (g++)"),
        (CPU, ("g++",), ""),
    ],
)
def test_a_missing_compiler_is_named(device, there, words, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    assert missing_tool(device) == words


def test_the_compiler_of_the_environment_counts_alone(monkeypatch):
    monkeypatch.setenv("CC", "/my/cc")
    assert missing_tool(CUDA) == ""
    monkeypatch.setattr("shutil.which", lambda name: None if name == "/my/cc" else name)
    assert missing_tool(CUDA) == "a C compiler, and there is none (/my/cc)"


def test_missing_triton_and_header_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    for device in (CPU, CUDA):
        assert (
            missing_tool(device)
            == f"the header files of Python, and there are none ({tmp_path / 'Python.h'})"
        )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_tool(CUDA) == "the package triton, and there is none"


def test_auto_without_a_compiler_trains_uncompiled_with_a_line(by_default, monkeypatch, caplog):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with caplog.at_level(logging.INFO, "openppo"):
        strategy, module = prepared(Named())
    assert not strategy.compiles
    assert (
        ", layers compiled" not in model_role("model", "m", module, strategy, is_trained=True)[1][1]
    )
    assert (
        "--compile auto: layers of trained models are not compiled, which is slower" in caplog.text
    )
    assert "that needs a C++ compiler, and there is none (g++)" in caplog.text


def test_auto_leaves_a_model_that_names_no_layers_with_a_line(by_default, caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        prepared(nn.Linear(1, 1))
    assert "are not compiled, which is slower: Linear does not name them." in caplog.text


def test_off_compiles_nothing_in_silence(by_default, caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        assert not prepared(Named(), compile="off")[0].compiles
    assert "compile" not in caplog.text


def test_the_table_at_the_start_names_compiled_layers(by_default):
    strategy, module = prepared(Named())
    assert strategy.compiles
    assert model_role("model", "m", module, strategy, is_trained=True)[1][1].endswith(
        ", layers compiled"
    )


def test_on_is_an_error_where_it_cannot_be(monkeypatch):
    with pytest.raises(
        ValueError, match="--compile: Linear does not name its layers; omit the flag"
    ):
        prepared(nn.Linear(1, 1), compile="on")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"--compile needs a C\+\+ compiler, and there is none \(g\+\+\).*omit the flag",
    ):
        prepared(Named(), compile="on")


def identity(folder: Path, option: str) -> dict[str, Any]:
    """What a checkpoint in ``folder`` of a run with this ``--compile`` is compared by."""
    config = from_options(
        TrainSFTConfig, pretrain="p", dataset="d", save_path=str(folder), compile=option
    )
    return Checkpointer(config, DeepspeedStrategy(config.deepspeed), "sft", {}).identity


def test_a_run_that_resumes_uncompiled_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        check_compatible(tmp_path, identity(tmp_path, "off"), identity(tmp_path, "auto"))
        assert "differ" not in caplog.text
        check_compatible(tmp_path, identity(tmp_path, "on"), identity(tmp_path, "auto"))
    assert (
        "options that differ from the checkpoint's, in force from now on: --compile on -> off"
        in caplog.text
    )


@pytest.mark.parametrize("cache_home", [True, False])
@pytest.mark.parametrize("set_by_torch", [True, False])
def test_compiled_code_is_kept_in_the_users_cache(cache_home, set_by_torch, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    if set_by_torch:
        cache_dir()
    if cache_home:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert compile_layers(Named())
    folder = tmp_path / ("mine" if cache_home else ".cache") / "openppo" / "torchinductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.is_dir()


def test_the_folder_of_the_environment_wins(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/my/folder")
    compile_layers(Named())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/my/folder"


def test_a_cache_that_cannot_be_written_stays_torchs_own(monkeypatch, tmp_path):
    cache_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compile_layers(Named())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation.os, "access", lambda folder, mode: False)
    compile_layers(Named())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    assert Path(tmp_path, "openppo", "torchinductor").is_dir()


def test_where_nothing_is_compiled_no_folder_is_named():
    assert not compile_layers(nn.Linear(1, 1))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
