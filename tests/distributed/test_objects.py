"""A run of the caller's objects is the run of what options name, bit for bit, and resumes when it gets them again."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.runs import left_by

PROGRAM = """
import json, sys
from itertools import islice
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.models import Actor
from openppo.trainer import build_ppo_trainer
from openppo.types import Prompt
from reward import reward_fn

tiny, runs, flags = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
NAMES = f"--critic_pretrain {tiny}/reward --ref_pretrain reference --prompt_data {tiny}/prompts.jsonl --label_key label"

def prompts(tokenizer, first=0):
    for i, row in enumerate(map(json.loads, open(f"{tiny}/prompts.jsonl"))):
        if i >= first:
            ids = tokenizer(row["input"]).input_ids
            yield Prompt(row["input"], ids, row["label"], row, None, f"{tiny}/prompts.jsonl", i)

def objects(kind):
    actor = AutoModelForCausalLM.from_pretrained(f"{tiny}/actor")
    actor.model.layers[0].requires_grad_("frozen" not in kind)
    return {
        "actor": Actor(actor) if kind == "wrapped" else actor,
        "critic": AutoModelForSequenceClassification.from_pretrained(f"{tiny}/reward"),
        "reference": AutoModelForCausalLM.from_pretrained(f"{tiny}/actor" if kind == "wrong" else "reference"),
        "tokenizer": AutoTokenizer.from_pretrained(f"{tiny}/actor"),
        "prompts": lambda tokenizer: prompts(tokenizer, first=kind == "fewer"),
        "reward_fn": reward_fn,
    }

for run in runs:
    name, kind, *more = run.split(":")
    named = kind == "named"
    given = f"{NAMES} --pretrain {tiny}/actor --reward_fn reward.py" if named else "--pretrain nothing_of_this_name"
    more = [word for flag in more for word in flag.split("=")]
    config = parse_options(TrainPPOConfig, [*given.split(), *flags, "--save_path", name, *more])
    try:
        trainer = build_ppo_trainer(config, **({} if named else objects(kind)))
    except ValueError as error:
        print(name, "is refused:", error)
        continue
    if "two_steps" in kind:
        for batch in islice(trainer.prompt_batches(), 2):
            trainer.report(trainer.step(batch))
    else:
        trainer.fit()
    trainer.components.trackers.close()
trainer.close()
"""
FLAGS = """--input_key input --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2 --generate_max_len 6
    --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --init_kl_coef 0.1 --save_steps 1 --max_ckpt_num 1""".split()


def start(tiny, folder):
    """The program, its reward, and a reference that is not the actor."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "reward.py").write_text(
        "def reward_fn(response, label):\n    return len(set(response)) - 0.1 * label\n"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny / "actor")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "reference")
    AutoTokenizer.from_pretrained(tiny / "actor").save_pretrained(folder / "reference")


def test_objects_train_as_their_names_do_and_resume(tiny, tmp_path, launch):
    start(tiny, tmp_path)
    runs = """names:named objects:plain wrapped:wrapped parts:two_steps frozen:frozen frozen_parts:frozen_two_steps
        frozen_parts:frozen:--load_checkpoint parts:wrong:--load_checkpoint parts:fewer:--load_checkpoint
        parts:named:--load_checkpoint parts:plain:--load_checkpoint
        lora_names:named:--lora_rank=2 lora:plain:--lora_rank=2"""
    printed = launch(1, "program.py", tiny, runs, *FLAGS, cwd=tmp_path)
    names, *others = (left_by(tmp_path / name) for name in ("names", "objects", "wrapped", "parts"))
    assert [line["step"] for line in names.metrics] == [1, 2, 3]
    assert all(line["kl"] > 0.01 and line["value_loss"] > 0 for line in names.metrics)
    assert all(run == names for run in others)
    assert left_by(tmp_path / "lora") == left_by(tmp_path / "lora_names") != names
    frozen, parts = (left_by(tmp_path / name) for name in ("frozen", "frozen_parts"))
    assert frozen == parts
    layers = {}
    for folder in (tiny / "actor", tmp_path / "frozen"):
        weights = load_file(folder / "model.safetensors")
        layers[folder.name] = [
            [w for n, w in sorted(weights.items()) if f"layers.{i}." in n] for i in (0, 1)
        ]
    assert all(map(torch.equal, layers["actor"][0], layers["frozen"][0]))
    assert not any(map(torch.equal, layers["actor"][1], layers["frozen"][1]))
    refused = [line for line in printed.splitlines() if "is refused" in line]
    assert len(refused) == 3
    for line, why in zip(
        refused,
        ("reference (given", "--prompt_data (given", "actor was given in Python"),
        strict=True,
    ):
        assert "this run contradicts its checkpoint" in line
        assert why in line


def test_whole_objects_train_under_zero_3_on_two_ranks(tiny, tmp_path, launch):
    start(tiny, tmp_path)
    launch(
        2,
        "program.py",
        tiny,
        "names:named objects:plain",
        *FLAGS,
        "--zero_stage",
        "3",
        cwd=tmp_path,
    )
    assert left_by(tmp_path / "names") == left_by(tmp_path / "objects")
