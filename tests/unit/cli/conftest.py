"""Folders of tiny models, good and bad, and a way to run a command inside this process."""

import json
import logging
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
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.conftest import save_tokenizer

FILES = {
    "prompts.jsonl": '{"input": "abc", "answer": "d"}\n' * 4,
    "tool.jsonl": '{"input": "ab<tool>c"}\n' * 4,
    "notes.txt": "a\n",
    "tasks.yaml": "tasks: [{name: one, data: D/prompts.jsonl, reward: D/reward.py}]\n",
    "sft.jsonl": '{"input": "abc", "output": "de"}\n' * 4,
    "long.jsonl": json.dumps({"input": "a" * 70, "output": "b"}) + "\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "bc", "rejected": "de", "margin": "much"}\n' * 4,
    "steps.jsonl": '{"input": "ab x c x", "label": "ab y c z"}\n' * 4,
    "texts.jsonl": '{"text": "abc"}\n' * 4,
    "reward.py": "def other():\n    pass\ndef reward_fn(prompts, responses, labels):\n    return [0] * len(prompts)\n",
    "needs.py": "import not_there\n",
    "params.py": "def reward_fn(prompts, colour):\n    return [0] * len(prompts)\n",
    "bare.jsonl": '{"input": "abc"}\n' * 4,
    "strange.jsonl": '{"foo": "abc", "bar": "d"}\n',
    "bad.yaml": "gama: 0.9\n",
    "judge.yaml": "prm_placeholder_token: x\nprm_reward_tokens: [good, bad]\n",
    "steps.yaml": "prm_placeholder_token: x\nprm_reward_tokens: [y, z]\n",
    "no_retries.yaml": "remote_rm_retries: 0\n",
    "texts.yaml": "pretrain_key: t\n",
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "bitsandbytes": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    },  # without quant_method, as early ones are
}
"""Models by what quantized them, and what their config says."""
GOOD = {
    "ppo": "--pretrain M/actor --prompt_data D/prompts.jsonl --reward_fn D/reward.py --generate_max_len 8 "
    "--rollout_batch_size 4 --train_batch_size 4",
    "sft": "--pretrain M/actor --dataset D/sft.jsonl --train_batch_size 4",
    "rm": "--pretrain M/actor --dataset D/pairs.jsonl --train_batch_size 4",
    "prm": "--pretrain M/actor --dataset D/steps.jsonl --train_batch_size 4 --placeholder_token x --reward_tokens y z",
    "generate": "--pretrain M/actor --prompt_data D/prompts.jsonl --generate_max_len 8 --output_path o.jsonl",
    "evaluate": "--pretrain M/actor --prompt_data D/prompts.jsonl --generate_max_len 8 --reward_fn D/reward.py",
    "merge_lora": "--lora_path M/actor --save_path merged",
    "serve_rm": "--reward_pretrain M/reward --port 0",
    "serve_agent": "--pretrain M/chat --port 0",
}
"""A command line that works; M/ is the folder of models and D/ the folder of data."""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    stderr: str


RunCommand = Callable[..., Ended]
Words = Callable[[str], tuple[str, list[str]]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders, named by what they are: ``actor`` and ``reward`` are good, each other has one flaw.

    Their tokenizer has one token per character and no chat template.
    """
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    letters = string.ascii_lowercase + string.digits + " "
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    causal, classifier = LlamaForCausalLM, LlamaForSequenceClassification

    def save(
        name: str, kind: Any, tokens: str = letters, size: int = 40, **options: Any
    ) -> PreTrainedTokenizerFast:
        config = LlamaConfig(
            vocab_size=size, **{"max_position_embeddings": 64, "num_labels": 1, **sizes, **options}
        )
        kind(config).save_pretrained(root / name)
        return save_tokenizer(root / name, tokens)

    for name in "actor headless broken_weights own_code own_tokenizer no_tokenizer".split():
        save(name, causal)
    chat = save("chat", causal)
    chat.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat.save_pretrained(root / "chat")
    for file in (root / "no_tokenizer").glob("*token*"):
        file.unlink()
    save("reward", classifier)
    save("two_labels", classifier, num_labels=2)
    save("short", classifier, max_position_embeddings=8)
    save("other_vocabulary", classifier, letters[::-1] + "!", size=41)
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 3,
    }
    save("rescaled", causal)
    config = json.loads((root / "rescaled/config.json").read_text()) | {"rope_parameters": rope}
    for name, kind, size in (
        ("unresized", causal, 40),
        ("resized", causal, 41),
        ("reward_unresized", classifier, 40),
    ):
        grown = save(name, kind, size=size)
        grown.add_special_tokens({"pad_token": "[PAD]"})
        grown.save_pretrained(root / name)
    save("padded", causal, size=48)
    other_end = save("other_end", causal)
    other_end.eos_token = "<unk>"
    other_end.save_pretrained(root / "other_end")
    with_tool = save("tool", causal)
    with_tool.add_tokens(["<tool>"])
    with_tool.save_pretrained(root / "tool")
    for name, kind in (("pickle", causal), ("reward_pickle", classifier)):
        save(name, kind)
        (root / name / "model.safetensors").unlink()
        torch.save({"a": CallsWhenUnpickled()}, root / name / "pytorch_model.bin")

    for name, method in QUANTIZED.items():
        save(name, causal)
        quantized = json.loads((root / name / "config.json").read_text()) | {
            "quantization_config": method
        }
        (root / name / "config.json").write_text(json.dumps(quantized))
    for name in ("own_code", "awq"):
        (root / f"{name}_adapters").mkdir()
        adapters = {"peft_type": "LORA", "base_model_name_or_path": str(root / name)}
        (root / f"{name}_adapters/adapter_config.json").write_text(json.dumps(adapters))
    files = {
        "broken_weights/model.safetensors": "\0" * 100,
        "own_code/config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}',
        "own_code/own.py": 'raise ValueError("its own code ran")',
        "own_tokenizer/tokenizer_config.json": '{"auto_map": {"AutoTokenizer": [null, "own.Own"]}}',
        "own_tokenizer/own.py": 'raise ValueError("its own code ran")',
        "rescaled/config.json": json.dumps(config),
    }
    for name, text in files.items():
        (root / name).write_text(text)
    return root


class CallsWhenUnpickled:
    """A pickle of it fails the tests when it is read without care."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("the pickle was run",)


@pytest.fixture
def run_in_process(monkeypatch, capfd, tmp_path: Path) -> Iterator[RunCommand]:
    """Runs a command as ``python -m openppo.cli.NAME ARGUMENTS`` would, away from the repository, until it exits.

    What a command changes in its process is put back, but for the process group of one rank, which stays.
    """
    logger, threads = logging.getLogger("openppo"), torch.get_num_threads()
    handlers, level, verbosity = (
        list(logger.handlers),
        logger.level,
        transformers.logging.get_verbosity(),
    )
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("openppo.cli.options._end_process", sys.exit)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # a command sets it where it is not
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )

    def run(command: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"{command}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            import_module(f"openppo.cli.{command}").main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, capfd.readouterr().err)

    yield run
    torch.set_num_threads(threads)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def put(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Puts the folders of models and data, which hold ``FILES``, into a text."""
    folder = tmp_path_factory.mktemp("data")
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("D/", f"{folder}/"))
    return lambda text: text.replace("M/", f"{models}/").replace("D/", f"{folder}/")


@pytest.fixture(scope="session")
def words(put: Callable[[str], str]) -> Words:
    """The module of a command and its arguments: those of ``GOOD`` with the options of a line laid over them."""

    def of(line: str) -> tuple[str, list[str]]:
        command, *given = line.split()
        options: dict[str, list[str]] = {}
        for word in [*GOOD[command].split(), *given]:
            if word.startswith("--"):
                options.pop(word, None)
                options[word] = []
            elif word.startswith("-"):
                del options["-" + word]
            else:
                options[next(reversed(options))].append(word)
        module = f"train_{command}" if command in ("ppo", "sft", "rm", "prm") else command
        return module, [put(part) for name, values in options.items() for part in (name, *values)]

    return of


@pytest.fixture
def run_line(run_in_process: RunCommand, words: Words) -> Callable[[str], Ended]:
    """Runs the command of a line (see ``words``) in this process."""

    def run(line: str) -> Ended:
        module, arguments = words(line)
        return run_in_process(module, *arguments)

    return run
