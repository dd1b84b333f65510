"""The split never matters for process reward models: the parameters are those of one rank and one micro-batch."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).with_name("run_steps.py")
EVERYTHING = 100  # as micro-batch size: more than there is
CASES = [
    *((labels, stage, micro) for labels in ("hard", "soft") for stage in (0, 3) for micro in (1, 3, EVERYTHING)),
    ("hard", 1, 3),
    ("hard", 2, 3),
]
PARAMETER_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 1e-3
"""Relative, of the norm of all parameters and of what training changed, as in test_split.py; 3e-7 and 4e-5 measured."""


def write_solutions(folder: Path) -> None:
    """26 solutions, one to five steps each: "h" is the placeholder, "a" and "b" are good and bad."""
    rng = random.Random(7)
    hard, soft = [], []
    for i in range(26):
        steps = ["".join(rng.choices("cdefg", k=rng.randint(1, 6))) + "h" for _ in range(1 + i % 5)]
        hard.append({"input": "".join(steps), "label": [rng.choice("ab") for _ in steps]})
        soft.append({"input": "".join(steps), "label": [rng.random() for _ in steps]})
    for name, rows in (("hard", hard), ("soft", soft)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Path:
    """Two steps of each case on one rank and on two; ``<ranks>/<case>/model`` and ``result.json``."""
    folder = tmp_path_factory.mktemp("prm")
    write_solutions(folder)
    cases = [
        {
            "name": "-".join(map(str, case)),
            "command": "train_prm",
            "n_rows": 13,
            "n_steps": 2,
            "arguments": f"""--pretrain {tiny}/actor --dataset {folder}/{case[0]}.jsonl --input_key input
                --label_key label --placeholder_token h --reward_tokens a b --train_batch_size 14
                --zero_stage {case[1]} --micro_train_batch_size {case[2]} --learning_rate 1e-3 --lr_warmup_ratio 0
                --lr_scheduler constant --eval_dataset {folder}/{case[0]}.jsonl""".split(),
        }
        for case in CASES
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    for ranks in (1, 2):
        (folder / str(ranks)).mkdir()
        launch(ranks, SCRIPT, folder / "cases.json", folder / str(ranks))
    return folder


def parameters(folder: Path) -> Tensor:
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("ranks", (1, 2))
def test_the_split_never_matters(trained: Path, tiny: Path, ranks: int, case: tuple[str, int, int]) -> None:
    folder = trained / str(ranks) / "-".join(map(str, case))
    reference = trained / "1" / f"{case[0]}-0-{EVERYTHING}"
    got, want, start = parameters(folder / "model"), parameters(reference / "model"), parameters(tiny / "actor")
    difference, update = (got - want).norm(), (want - start).norm()
    assert update > 1e-3 * want.norm(), "the steps are too small to tell"
    assert difference <= PARAMETER_TOLERANCE * want.norm()
    assert difference <= UPDATE_TOLERANCE * update
    metrics, wanted = (json.loads((f / "result.json").read_text())["metrics"] for f in (folder, reference))
    for step in (0, 1):
        for name in ("loss", "accuracy", "eval_loss", "eval_accuracy", "grad_norm"):
            assert metrics[step][name] == pytest.approx(wanted[step][name], rel=1e-3, abs=1e-5), (step, name)


def test_ppo_is_rewarded_for_each_step_by_a_process_reward_model(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    arguments = f"""--pretrain {tiny}/actor --prm_pretrain {tiny}/actor --prm_placeholder_token h
        --prm_reward_tokens a b --step_separator d --input_template c{{}}e --prompt_data {tiny}/prompts.jsonl
        --rollout_batch_size 24 --train_batch_size 24 --micro_rollout_batch_size 5 --generate_max_len 12
        --zero_stage 3 --save_path {tmp_path}/model"""
    launch(2, "-m", "openppo.cli.train_ppo", *arguments.split())
    logs = tmp_path / "model" / "logs"
    [metrics] = map(json.loads, (logs / "metrics.jsonl").read_text().splitlines())
    samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
    model, tokenizer = (auto.from_pretrained(tiny / "actor") for auto in (AutoModelForCausalLM, AutoTokenizer))
    good, bad = tokenizer.convert_tokens_to_ids(["a", "b"])
    for sample in samples:
        response = sample["response"].replace("<eos>", "").replace("<pad>", "").replace("<unk>", "")
        read, expected = sample["prompt"], 0.0
        for number, step in enumerate([step for step in response.split("d") if step]):
            read += ("d" if number else "") + step + "h"
            logits = model(**tokenizer(read, return_tensors="pt")).logits[0, -1]
            expected += logits[[good, bad]].softmax(-1)[0].item()
        assert sample["reward"] == pytest.approx(expected, abs=1e-4), sample
    assert len({sample["reward"] for sample in samples}) > 3
    assert 0 < metrics["reward"] < 3
