"""A folder with tiny models and data of each kind."""

import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.conftest import save_tokenizer

Run = Callable[..., str]
REPO = Path(__file__).parents[2]
SCRIPTS = REPO / "examples/scripts"
CHAT = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SIZES["max_position_embeddings"] = 2048


TALK = "\n\nHuman: Say {}.\n\nAssistant: "
DATA: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"input": f"say {i}", "label": str(i), "difficulty": i} for i in range(8)],
    "sft": [{"input": f"say {i}", "output": str(i)} for i in range(8)],
    "preference": [{"prompt": f"say {i}", "chosen": str(i), "rejected": "no"} for i in range(8)],
    "math": [
        {"question": f"What is {i} + {i}?", "answer": f"Add them.\n#### {2 * i}"} for i in range(8)
    ],
    "dialogues": [
        {"chosen": TALK.format(i) + str(i), "rejected": TALK.format(i) + "I will not."}
        for i in range(8)
    ],
    "steps": [{"input": f"1 + {i}#done#", "label": ["+", "-"]} for i in range(8)],
    "documents": [{"text": f"a document, number {i}"} for i in range(8)],
}
"""Eight rows of each kind, made by hand in the forms of the field."""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``policy`` and ``reward`` with one token per character and a chat template; data as below."""
    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    scores = {"num_labels": 1, "mean": 0.0, "std": 1.0}  # for --normalize_reward
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        # the special token is for process rewards
        tokenizer = save_tokenizer(folder / name, string.printable, ["ки"], chat_template=CHAT)
        ends = {
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        }
        kind(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **scores, **ends)).save_pretrained(
            folder / name
        )
    for name, rows in DATA.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of_script(script: Path, folder: Path, more: str = "") -> list[list[str]]:
    """The words that a script in ``folder`` gives to each program that it calls, which does nothing."""
    notes = "printf '%s\\0' \"$@\" $'\\n' >> \"$CALLS\""
    for name, does in {
        "torchrun": notes,
        "python": notes,
        "srun": notes,
        "scontrol": "echo host",
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / name).chmod(0o755)
    place = folder / "examples/scripts"
    place.mkdir(parents=True, exist_ok=True)
    (place / script.name).write_text(script.read_text())
    (place / "setup.sh").write_text(f"repo='{folder}'\ninstall() {{ :; }}\n")
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
    }
    environment |= {"MODEL": "m", "SLURM_JOB_NODELIST": "host"}
    (folder / "calls").write_text("")
    command = ["bash", str(place / script.name), *more.split()]
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    return [call.split("\0")[:-1] for call in (folder / "calls").read_text().split("\n\0")]


TRAIN = """
import sys

from openppo.cli.options import parse_options
from openppo.cli.train_ppo import build
from openppo.config import TrainPPOConfig, TrainRMConfig, TrainSFTConfig
from openppo.build.supervised import build_supervised_trainer

BUILD = {
    "train_ppo": (TrainPPOConfig, build),
    "train_sft": (TrainSFTConfig, build_supervised_trainer),
    "train_rm": (TrainRMConfig, build_supervised_trainer),
}
for line in sys.argv[1:]:
    command, *flags = line.split("\\t")
    config, make = BUILD[command]
    trainer = make(parse_options(config, flags))
    trainer.fit()
    assert trainer.global_step >= 2
    print("done", flush=True)
trainer.close()  # once: all share the process group
"""


def train(run: Run, folder: Path, lines: Sequence[Sequence[str]]) -> None:
    """Train with each line, a command and its flags, all in one process; each makes two steps or more."""
    printed = run([sys.executable, "-c", TRAIN, *map("\t".join, lines)], folder)
    assert printed.splitlines().count("done") == len(lines)
