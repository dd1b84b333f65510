"""Inputs small enough to train on a laptop's CPU in a second."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.processor_files import copy_processor
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
OWN = """
import random

class Growing:
    def __init__(self, init_kl_coef):
        self.value, self.seen = init_kl_coef, []

    def update(self, current, n_steps):
        self.seen.append(current)
        self.value += 0.1 * sum(self.seen) / n_steps

def mixed(prompts, episode, seed):
    order = list(range(len(prompts)))
    random.Random(seed + episode).shuffle(order)
    return order[1:] + order[1:2]
"""
"""A controller whose state is a history, and an order that leaves a prompt out and repeats another."""
GALLERY = """
import random
from PIL import Image
async def solve(task, session):
    dice, messages = random.Random(task.env_seed), list(task.messages)
    for turn in range(2):
        answer = await session.chat(messages)
        seen = Image.frombytes("RGB", (16, 16), dice.randbytes(768))
        parts = [{"type": "text", "text": dice.choice("abcdefgh")}, {"type": "image", "image": seen}]
        messages = [*answer.messages, {"role": "user", "content": parts[: 1 + dice.randrange(2)]}]
    return answer.text.count("a") / 4
"""
"""An agent that shows images between turns, or none."""


def write_rows(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(tokenizer: PreTrainedTokenizerFast, **more: int) -> LlamaConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    # the default range gives a nearly uniform policy, on which little can go wrong
    return LlamaConfig(initializer_range=0.2, **sizes, **ends, **more)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``actor`` and ``reward``, both with tokenizer, and JSON lines of each kind of data.

    ``prompts`` (input, label), ``documents`` (input), ``sft`` (input, output), ``preference`` (prompt, chosen,
    rejected, margin): texts of unequal length. Chosen texts say "a" more often than rejected ones. ``llava`` reads
    images, and has ``images`` (input, images, output).
    """
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    tokenizer = save_tokenizer(folder / "actor", LETTERS)
    LlamaForCausalLM(_config(tokenizer)).save_pretrained(folder / "actor")
    save_tokenizer(folder / "reward", LETTERS)
    LlamaForSequenceClassification(_config(tokenizer, num_labels=1)).save_pretrained(
        folder / "reward"
    )

    save_tokenizer(folder / "chat", LETTERS, ["<turn>"], chat_template=CHAT)
    LlamaForCausalLM(_config(AutoTokenizer.from_pretrained(folder / "chat"))).save_pretrained(
        folder / "chat"
    )
    (folder / "game.py").write_text(GAME)
    (folder / "own.py").write_text(OWN)

    rng = random.Random(7)

    def text(least: int, most: int, letters: str = LETTERS) -> str:
        return "".join(rng.choices(letters, k=rng.randint(least, most)))

    write_rows(folder / "prompts.jsonl", [{"input": text(1, 9), "label": i} for i in range(24)])
    write_rows(folder / "documents.jsonl", [{"input": text(1, 24)} for _ in range(14)])
    write_rows(
        folder / "sft.jsonl", [{"input": text(1, 9), "output": text(1, 9)} for _ in range(26)]
    )
    pairs = [
        {
            "prompt": text(1, 5),
            "chosen": text(2, 9, "aab"),
            "rejected": text(2, 9, "bcd"),
            "margin": 0.5 * (i % 3),
        }
        for i in range(26)
    ]
    write_rows(folder / "preference.jsonl", pairs)
    write_llava(folder / "llava")
    return folder


def write_llava(folder: Path) -> None:
    """A model that reads images, with its processor, and ``images.jsonl`` of prompts with 0, 1 and 3 images.

    Beside it ``reward`` scores them, ``pairs.jsonl`` has two responses to each, and ``gallery.py`` an agent.
    """
    rng = random.Random(9)
    tokenizer = save_tokenizer(folder, LETTERS, ["<image>", "<turn>"], chat_template=CHAT)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    given = {"image_token": "<image>", "num_additional_image_tokens": 1}
    LlavaProcessor(
        CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **given
    ).save_pretrained(folder)
    seen = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    parts: Any = {
        "vision_config": seen,
        "text_config": _config(tokenizer),
        "vision_feature_layer": -1,
    }
    config = LlavaConfig(**parts, image_token_index=image_token, **ends)
    torch.manual_seed(8)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    rows: list[dict[str, object]] = []
    for i in range(26):
        names = [f"{i}-{k}.png" for k in range((1, 0, 3)[i % 3])]
        for name in names:
            Image.frombytes("RGB", (20, 16), rng.randbytes(20 * 16 * 3)).save(folder / name)
        parts = [
            "<image>" * len(names[:2]),
            "".join(rng.choices(LETTERS, k=12 + i % 5)),
            "<image>" * len(names[2:]),
        ]
        rows.append(
            {
                "input": "".join(parts),
                "images": names,
                "output": "".join(rng.choices(LETTERS, k=3 + i % 4)),
            }
        )
    write_rows(folder / "images.jsonl", rows)
    answers = [
        {"chosen": row["output"], "rejected": "".join(rng.choices(LETTERS, k=4))} for row in rows
    ]
    write_rows(
        folder / "pairs.jsonl", [row | more for row, more in zip(rows, answers, strict=True)]
    )
    (folder / "gallery.py").write_text(GALLERY)
    with torch.random.fork_rng():
        scoring = get_llm_for_sequence_regression(str(folder), "reward", init_value_head=True)
    scoring.model.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    copy_processor(str(folder), folder / "reward")


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
        return launch(
            ranks, Path(__file__).with_name("run_cases.py"), file, folder, *mode, status=status
        )

    return run
