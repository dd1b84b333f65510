"""What commands settle for GPUs when they start, tried on CPUs."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from openppo.cli.options import parse_options
from openppo.config import DeepSpeedConfig, TrainPPOConfig
from openppo.strategy import comm
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer import build_ppo_trainer

RunLine = Callable[[str], Any]


@pytest.fixture
def cudnn_on() -> Iterator[None]:
    """As torch has it at the start of a process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("command", ["ppo", "sft", "rm", "prm", "generate", "evaluate", "serve_rm"])
@pytest.mark.usefixtures("cudnn_on")
def test_cudnn_attention_is_off_when_models_are_loaded(command: str, run_line: RunLine) -> None:
    model = "--reward_pretrain" if command == "serve_rm" else "--pretrain"
    assert "its weights cannot be read" in run_line(f"{command} {model} M/broken_weights").stderr
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("bf16", [False, True])
def test_float32_on_a_gpu_is_named_with_its_remedy(
    bf16: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DeepspeedStrategy(DeepSpeedConfig(bf16=bf16))
    InferenceStrategy(bf16)
    with caplog.at_level(logging.INFO, logger="openppo"):
        comm.set_up_gpu(bf16)
        assert caplog.records == [], "on a CPU"
        monkeypatch.setattr(comm, "_on_gpu", lambda: True)
        comm.set_up_gpu(bf16)
    assert ["--bf16" in record.getMessage() for record in caplog.records] == ([] if bf16 else [True])


@pytest.mark.parametrize("command", ["ppo", "generate", "evaluate"])
def test_old_transformers_are_refused_where_a_gpu_decodes(
    command: str, run_line: RunLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{command} --pretrain M/broken_weights"
    monkeypatch.setattr(transformers, "__version__", "5.22.0")
    assert "its weights cannot be read" in run_line(line).stderr, "on a CPU"
    monkeypatch.setattr(comm, "_on_gpu", lambda: True)
    ended = run_line(line)
    assert ended.code == 2
    assert "transformers 5.22.0" in ended.stderr
    assert "pip install 'transformers>=5.23'" in ended.stderr


@pytest.mark.parametrize(("version", "refused"), [("5.22.9", True), ("5.23.0", False), ("5.100.0", False)])
def test_transformers_are_compared_by_version(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "_on_gpu", lambda: True)
    monkeypatch.setattr(transformers, "__version__", version)
    if refused:
        with pytest.raises(ValueError, match="5.23"):
            comm.check_transformers()
    else:
        comm.check_transformers()


@pytest.mark.parametrize(("given", "rows"), [("", 64), (" --max_num_seqs 3", 3)])
def test_max_num_seqs_holds_for_a_model_whose_memory_cannot_be_estimated(
    given: str, rows: int, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncounted(*_: Any) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr("openppo.trainer.memory.model_size", uncounted)
    line = f"ppo --advantage_estimator reinforce --init_kl_coef 0 --save_path {tmp_path}{given}"
    trainer: Any = build_ppo_trainer(parse_options(TrainPPOConfig, words(line)[1]))
    assert trainer.components.estimate is None
    assert trainer.components.engine.max_batch_size == rows
    trainer.components.trackers.close()
