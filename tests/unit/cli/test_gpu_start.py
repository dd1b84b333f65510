"""What commands settle for GPUs when they start, tried on CPUs."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from openppo.config import DeepSpeedConfig
from openppo.strategy import comm
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.deepspeed import DeepspeedStrategy

RunCommand = Callable[..., Any]

ROWS = {
    "prompts": {"input": "abc"},
    "sft": {"input": "abc", "output": "de"},
    "pairs": {"prompt": "a", "chosen": "bc", "rejected": "de"},
    "steps": {"input": "ab x c x", "label": "ab y c z"},
}
COMMANDS = {
    "train_ppo": "--prompt_data prompts.jsonl --reward_fn reward.py --generate_max_len 8 "
    "--rollout_batch_size 4 --train_batch_size 4",
    "train_sft": "--dataset sft.jsonl --train_batch_size 4",
    "train_rm": "--dataset pairs.jsonl --train_batch_size 4",
    "train_prm": "--dataset steps.jsonl --train_batch_size 4 --placeholder_token x --reward_tokens y z",
    "generate": "--prompt_data prompts.jsonl --generate_max_len 8 --output_path out.jsonl",
    "evaluate": "--prompt_data prompts.jsonl --generate_max_len 8 --reward_fn reward.py",
    "serve_rm": "--port 0",
}


@pytest.fixture
def data(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    (tmp_path / "reward.py").write_text("def reward_fn(responses):\n    return [0.0] * len(responses)\n")


@pytest.fixture
def cudnn_on() -> Iterator[None]:
    """As torch has it at the start of a process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("data", "cudnn_on")
def test_cudnn_attention_is_off_when_models_are_loaded(command: str, models: Path, run_in_process: RunCommand) -> None:
    model = "--reward_pretrain" if command == "serve_rm" else "--pretrain"
    ended = run_in_process(command, model, str(models / "broken_weights"), *COMMANDS[command].split())
    assert "its weights cannot be read" in ended.stderr
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


@pytest.mark.parametrize("command", ["train_ppo", "generate", "evaluate"])
@pytest.mark.usefixtures("data")
def test_old_transformers_are_refused_where_a_gpu_decodes(
    command: str, models: Path, run_in_process: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--pretrain", str(models / "broken_weights"), *COMMANDS[command].split())
    monkeypatch.setattr(transformers, "__version__", "5.22.0")
    assert "its weights cannot be read" in run_in_process(command, *arguments).stderr, "on a CPU"
    monkeypatch.setattr(comm, "_on_gpu", lambda: True)
    ended = run_in_process(command, *arguments)
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
