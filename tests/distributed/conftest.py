"""Inputs small enough to train on a laptop's CPU in a second."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.conftest import save_tokenizer

LETTERS = "abcdefgh"
CHAT = "{% for m in messages %}{{ m['role'][0] }}<turn>{{ m['content'] }}<eos>{% endfor %}a<turn>"
GAME = """
import random, time
class Game:
    def reset(self, *, seed=None, options=None):
        self.dice, self.n = random.Random(seed), 0
        return self.dice.choice("abcdefgh"), {}
    def parse(self, text):
        return text.strip() or None
    def step(self, action):
        self.n += 1
        time.sleep(0.002 * random.SystemRandom().random())  # turns meet in other batches each time
        done = self.n == 3 or "h" in action
        return self.dice.choice("abcdefgh"), action.count("a") / 4, done, False, {}
"""
"""A deterministic environment whose answers take their time."""


def write_rows(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(tokenizer: PreTrainedTokenizerFast, **more: int) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    # the default range gives a nearly uniform policy, on which little can go wrong
    return LlamaConfig(initializer_range=0.2, **sizes, **ends, **more)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``actor`` and ``reward``, both with tokenizer, and JSON lines of each kind of data.

    ``prompts`` (input, label), ``documents`` (input), ``sft`` (input, output), ``preference`` (prompt, chosen,
    rejected, margin): texts of unequal length. Chosen texts say "a" more often than rejected ones.
    """
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    tokenizer = save_tokenizer(folder / "actor", LETTERS)
    LlamaForCausalLM(_config(tokenizer)).save_pretrained(folder / "actor")
    save_tokenizer(folder / "reward", LETTERS)
    LlamaForSequenceClassification(_config(tokenizer, num_labels=1)).save_pretrained(folder / "reward")

    save_tokenizer(folder / "chat", LETTERS, ["<turn>"], chat_template=CHAT)
    LlamaForCausalLM(_config(AutoTokenizer.from_pretrained(folder / "chat"))).save_pretrained(folder / "chat")
    (folder / "game.py").write_text(GAME)

    rng = random.Random(7)

    def text(least: int, most: int, letters: str = LETTERS) -> str:
        return "".join(rng.choices(letters, k=rng.randint(least, most)))

    write_rows(folder / "prompts.jsonl", [{"input": text(1, 9), "label": i} for i in range(24)])
    write_rows(folder / "documents.jsonl", [{"input": text(1, 24)} for _ in range(14)])
    write_rows(folder / "sft.jsonl", [{"input": text(1, 9), "output": text(1, 9)} for _ in range(26)])
    pairs = [
        {"prompt": text(1, 5), "chosen": text(2, 9, "aab"), "rejected": text(2, 9, "bcd"), "margin": 0.5 * (i % 3)}
        for i in range(26)
    ]
    write_rows(folder / "preference.jsonl", pairs)
    return folder


@pytest.fixture(scope="session")
def run_cases(tiny: Path, launch: Callable[..., str]) -> Callable[..., str]:
    """``run_cases(ranks, folder, cases, mode)`` runs cases of run_cases.py in one launch; returns what it printed.

    ``cases`` are texts of flags, or dictionaries with such ``arguments``, by name; ``{tiny}`` and ``{folder}`` in them
    are replaced.
    """

    def run(ranks: int, folder: Path, cases: Mapping[str, Any], *mode: str, status: int = 0) -> str:
        described = []
        for name, given in cases.items():
            case = {"arguments": given} if isinstance(given, str) else dict(given)
            text = case["arguments"].replace("{tiny}", str(tiny)).replace("{folder}", str(folder))
            described.append(case | {"name": name, "arguments": text.split()})
            (folder / name).mkdir(parents=True, exist_ok=True)
        file = folder / f"cases{''.join(mode)}.json"
        file.write_text(json.dumps(described))
        return launch(ranks, Path(__file__).with_name("run_cases.py"), file, folder, *mode, status=status)

    return run
