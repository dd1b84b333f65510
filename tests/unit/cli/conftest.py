"""Folders of tiny models, good and bad, and a way to run a command inside this process."""

import json
import logging
import os
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CONTEXT = 64


@dataclass
class Ended:
    """How a command ended."""

    code: int
    stderr: str


RunCommand = Callable[..., Ended]


def _tokenizer(letters: str) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<unk>"]
    core = Tokenizer(WordLevel({token: i for i, token in enumerate([*special, *letters])}, unk_token="<unk>"))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders, named by what they are: ``actor`` and ``reward`` are good, each other has one flaw.

    Their tokenizer has one token per character and no chat template.
    """
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    letters = string.ascii_lowercase + string.digits + " "

    def config(n_letters: int, **options: int) -> LlamaConfig:
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        return LlamaConfig(vocab_size=3 + n_letters, max_position_embeddings=CONTEXT, **sizes, **ends, **options)

    def save(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        return root / name

    ours, other = _tokenizer(letters), _tokenizer(letters[::-1] + "!")
    save("actor", LlamaForCausalLM(config(37)), ours)
    save("reward", LlamaForSequenceClassification(config(37, num_labels=1)), ours)
    save("two_labels", LlamaForSequenceClassification(config(37, num_labels=2)), ours)
    save("headless", LlamaForCausalLM(config(37)), ours)
    save("other_vocabulary", LlamaForSequenceClassification(config(38, num_labels=1)), other)

    short = config(37, num_labels=1)
    short.max_position_embeddings = 8
    save("short", LlamaForSequenceClassification(short), ours)
    grown = _tokenizer(letters)
    grown.add_special_tokens({"pad_token": "[PAD]"})
    save("unresized", LlamaForCausalLM(config(37)), grown)
    save("resized", LlamaForCausalLM(config(38)), grown)
    save("reward_unresized", LlamaForSequenceClassification(config(37, num_labels=1)), grown)
    with_tool = _tokenizer(letters)
    with_tool.add_tokens(["<tool>"])
    save("tool", LlamaForCausalLM(config(37)), with_tool)

    rescaled = config(37, num_labels=1)
    rescaled.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    rescaled.rope_parameters["original_max_position_embeddings"] = 3
    save("rescaled", LlamaForCausalLM(rescaled), ours)
    (root / "no_config").mkdir()
    (root / "no_config" / "notes.txt").write_text("nothing here")
    (save("config_only", LlamaForCausalLM(config(37)), ours) / "model.safetensors").unlink()
    (save("broken_weights", LlamaForCausalLM(config(37)), ours) / "model.safetensors").write_bytes(b"\0" * 100)
    LlamaForCausalLM(config(37)).save_pretrained(root / "no_tokenizer")
    (save("broken_config", LlamaForCausalLM(config(37)), ours) / "config.json").write_text("{")
    (save("unknown_kind", LlamaForCausalLM(config(37)), ours) / "config.json").write_text('{"model_type": "abacus"}')
    own = save("own_code", LlamaForCausalLM(config(37)), ours)
    (own / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (own / "own.py").write_text('raise ValueError("its own code ran")')
    own = save("own_tokenizer", LlamaForCausalLM(config(37)), ours)
    (own / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": [null, "own.Own"]}}')
    (own / "own.py").write_text('raise ValueError("its own code ran")')
    (root / "own_adapters").mkdir()
    (root / "own_adapters" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(root / "own_code")})
    )
    for name, kind in (("pickle", LlamaForCausalLM), ("reward_pickle", LlamaForSequenceClassification)):
        folder = save(name, kind(config(37, num_labels=1)), ours)
        (folder / "model.safetensors").unlink()
        torch.save({"a": CallsWhenUnpickled()}, folder / "pytorch_model.bin")
    return root


class CallsWhenUnpickled:
    """A pickle of it fails the tests when it is read without care."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("the pickle was run",)


@pytest.fixture
def run_in_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[RunCommand]:
    """Runs a command as ``python -m openppo.cli.NAME ARGUMENTS`` would, away from the repository, until it exits.

    What a command changes in its process is put back, but for the process group of one rank, which stays.
    """
    logger, environment, threads = logging.getLogger("openppo"), dict(os.environ), torch.get_num_threads()
    handlers, level, verbosity = list(logger.handlers), logger.level, transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def run(command: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"{command}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            import_module(f"openppo.cli.{command}").main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, capfd.readouterr().err)

    yield run
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(threads)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
