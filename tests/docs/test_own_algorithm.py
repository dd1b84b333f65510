"""The files of "Your own algorithm" train as what they are written after, bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.docs.conftest import Run
from tests.docs.test_documents import commands, write_files

FLAGS = """--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl --n_samples_per_prompt 4
    --max_epochs 2 --rollout_batch_size 4 --train_batch_size 8 --micro_train_batch_size 4 --generate_max_len 4
    --actor_learning_rate 1e-2 --init_kl_coef 0.1 --reward_clip_range -1 1"""
OURS = "--policy_loss_type ppo --advantage_estimator rloo --prompt_order given"
TRAIN = """
import sys
from openppo.cli.options import parse_options
from openppo.cli.train_ppo import build
from openppo.config import TrainPPOConfig

for line in sys.argv[1:]:
    trainer = build(parse_options(TrainPPOConfig, line.split()))
    trainer.fit()
trainer.close()
"""
OF_A_MACHINE = ("time", "speed/", "memory")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step, without those of the machine."""
    lines = (folder / "logs/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in row.items() if not name.startswith(OF_A_MACHINE)}
        for row in rows
    ]


def test_files_of_the_page_train_as_ours_bit_for_bit(run: Run, workshop: Path) -> None:
    names = ["my_loss.py", "my_estimator.py", "my_controller.py", "my_order.py", "my_curriculum.py"]
    assert write_files("algorithms/own", workshop) == names
    for name in names:
        code = [line for line in (workshop / name).read_text().splitlines() if line]
        assert len(code) <= 10, name

    (words,) = commands("algorithms/own")
    places = [i for i, word in enumerate(words) if word.startswith("my_")]
    own = " ".join(f"{words[i - 1]} {words[i]}" for i in places)
    assert len(places) == 4
    curriculum = "--prompt_order my_curriculum.py:easy_first --num_episodes 2"
    rows = [json.dumps({"input": f"say {i}", "level": 8 - i}) + "\n" for i in range(8)]
    (workshop / "levels.jsonl").write_text("".join(rows))
    lines = [
        f"{FLAGS} {OURS} --save_path ours",
        f"{FLAGS} {own} --save_path own",
        f"{FLAGS} {OURS} --prompt_order shuffled --save_path shuffled",
        f"{FLAGS.replace('prompts.jsonl', 'levels.jsonl')} {curriculum} --advantage_estimator rloo --save_path easy",
    ]
    run([sys.executable, "-c", TRAIN, *lines], workshop)

    ours, own_run, shuffled = (metrics(workshop / name) for name in ("ours", "own", "shuffled"))
    assert len(ours) == 2
    assert "clip_fraction" in ours[0]
    assert ours == own_run
    assert ours != shuffled, "the order matters"
    weights = [
        load_file(workshop / name / "model.safetensors") for name in ("ours", "own", "policy")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])

    lines = (workshop / "easy/logs/samples.jsonl").read_text().splitlines()
    shown = {1: set(), 2: set()}
    for row in map(json.loads, lines):
        shown.get(row["step"], set()).add(row["prompt"])
    easy = {f"say {i}" for i in range(4, 8)}
    assert shown[1] and shown[1] <= easy, "the lowest levels come first"
    assert shown[2] and shown[2].isdisjoint(easy)
    assert len(metrics(workshop / "easy")) == 4
