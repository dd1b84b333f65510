"""The trainers learn, from a random model of two layers in seconds; the examples keep what README and they promise."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.conftest import save_tokenizer

REPO = Path(__file__).parents[2]
LETTERS = "abcdefgh"
Train = Callable[[str, dict[str, list[Any]], str], list[dict[str, Any]]]
REWARD = """import re

def reward_fn(response):
    letters = re.sub("<[a-z]+>", "", response)  # a random model writes special tokens too
    return letters.count("a") / max(len(letters), 1)
"""
PPO = """train_ppo --reward_fn reward.py --prompt_data prompts.jsonl --train_batch_size 32 --micro_train_batch_size 32
    --micro_rollout_batch_size 64 --generate_max_len 8 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3"""


def word(rng: random.Random, least: int, most: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=rng.randint(least, most)))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def train(run: Callable[..., str], tmp_path: Path) -> Train:
    """``train(characters, data, command)``: the metrics of a command for a random Llama of two layers, into ``out``.

    Its tokens are the characters; ``data`` has the rows of each file; the reward is the share of the letter a.
    """

    def logged(characters: str, data: dict[str, list[Any]], command: str) -> list[dict[str, Any]]:
        tokenizer = save_tokenizer(tmp_path / "model", characters)
        ends = {
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        }
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(
            tmp_path / "model"
        )
        for name, rows in data.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "reward.py").write_text(REWARD)
        name, *words = f"{command} --pretrain model --save_path out".split()
        run([sys.executable, "-m", f"openppo.cli.{name}", *words], tmp_path)
        return rows_of(tmp_path / "out" / "logs" / "metrics.jsonl")

    return logged


def prompts() -> dict[str, list[Any]]:
    rng = random.Random(0)
    return {"prompts": [{"input": word(rng, 1, 6)} for _ in range(64)]}


def test_ppo_learns_to_prefer_a_letter(train: Train, tmp_path: Path) -> None:
    lines = train(
        LETTERS, prompts(), f"{PPO} --num_episodes 30 --rollout_batch_size 64 --max_epochs 2"
    )
    assert len(lines) == 30
    assert fmean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert fmean(line["reward"] for line in lines[-5:]) > 0.8
    assert (
        fmean(line["value_loss"] for line in lines[-5:]) < 0.5 * lines[0]["value_loss"]
    )  # the critic learns too
    assert lines[0]["kl_k3"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0.5
    samples = rows_of(tmp_path / "out" / "logs" / "samples.jsonl")
    assert fmean("a" in sample["response"] for sample in samples[-20:]) > 0.8


SLOW = [
    "reinforce_baseline",
    "rloo",
    "group_norm --policy_loss_type gspo --eps_clip 0.02 --eps_clip_high 0.03",
]
CRITIC_FREE = [
    "reinforce",
    "group_norm --use_kl_loss --kl_estimator k3",
    "dr_grpo --dynamic_sampling 2 --ema_beta 0.992",
    "remax",
    "rloo --policy_loss_type cispo --rollout_correction tis",
    *(pytest.param(flags, marks=pytest.mark.slow) for flags in SLOW),
]


@pytest.mark.parametrize("estimator", CRITIC_FREE)
def test_every_estimator_without_a_critic_learns_to_prefer_a_letter(
    train: Train, estimator: str
) -> None:
    more = f"--num_episodes 8 --rollout_batch_size 16 --n_samples_per_prompt 4 --advantage_estimator {estimator}"
    lines = train(LETTERS, prompts(), f"{PPO} {more}")
    assert fmean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert fmean(line["reward"] for line in lines[-4:]) > 0.7
    assert not any("value_loss" in line for line in lines)


DATA = "--dataset train.jsonl --eval_dataset heldout.jsonl --train_batch_size 32 --micro_train_batch_size 32"


def test_sft_learns_to_copy_the_last_letter(train: Train) -> None:
    rng = random.Random(0)
    words = [word(rng, 1, 6, "abcdefg") for _ in range(320)]
    rows = [{"input": letters + "h", "output": letters[-1] * 3} for letters in words]
    data = {"train": rows[:256], "heldout": rows[256:]}
    lines = train(LETTERS, data, f"train_sft {DATA} --max_epochs 10 --learning_rate 1e-2")
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert lines[0]["loss"] > 2.0  # a random model: log(11) = 2.4
    assert len(evaluated) == 10
    assert evaluated[-1] < 0.1  # without a look at the prompt: log(7) / 4 = 0.49 at best


def solution(rng: random.Random) -> dict[str, object]:
    """Two to five sums, each followed by the placeholder; half of them are wrong."""
    text, labels = "", []
    for _ in range(rng.randint(2, 5)):
        a, b, right = rng.randint(0, 4), rng.randint(0, 4), rng.random() < 0.5
        result = a + b if right else rng.choice([n for n in range(9) if n != a + b])
        text += f"{a}+{b}={result}#"
        labels.append("G" if right else "B")
    return {"input": text, "label": labels}


def test_prm_learns_to_tell_right_sums_from_wrong_ones(train: Train) -> None:
    rng = random.Random(0)
    data = {
        name: [solution(rng) for _ in range(n)] for name, n in (("train", 2048), ("heldout", 128))
    }
    flags = """--input_key input --label_key label --placeholder_token # --reward_tokens G B --max_epochs 8
        --learning_rate 1e-2"""
    lines = train("#GB+=;012345678", data, f"train_prm {DATA.replace('32', '64')} {flags}")
    evaluated = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert lines[0]["loss"] > 0.6  # a random model: log(2) = 0.69
    assert evaluated[-1] > 0.9  # always "wrong" or always "right": about 0.5


def bash(script: str, *words: str, **variables: str) -> str:
    """What a script to copy prints."""
    command = ["bash", str(REPO / "examples/scripts" / script), *words]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_ppo_raises_exact_match_of_the_quickstart_by_twenty_points(tmp_path: Path) -> None:
    said = bash("quickstart.sh", "1", str(tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["before"]["kl"] == 0
    assert report["after"]["exact match"] - report["before"]["exact match"] >= 20
    for shown in ("exact match (greedy), %", "before PPO", "after PPO", "curves  tensorboard"):
        assert shown in said
    assert f"report  {tmp_path}/run/ppo/logs/report.html" in said
    assert (tmp_path / "run" / "ppo" / "logs" / "report.html").is_file()


@pytest.mark.slow
def test_stories_get_happier_and_stay_likely_under_the_untouched_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: Path
) -> None:
    """The README's command with half its steps, so a smaller rise is asked for."""
    model = str(assets / "models" / "stories260K")
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    import stories

    variables = {"MODEL": model, "SAVE_PATH": str(tmp_path / "happy"), "OMP_NUM_THREADS": "1"}
    assert "mean sentiment" in bash("stories.sh", "--num_episodes", "6", **variables)
    heldout = tmp_path / "happy" / "data" / "heldout.jsonl"
    before, after = (
        stories.evaluate(policy, model, heldout, new_tokens=96, seed=0)
        for policy in (model, str(tmp_path / "happy"))
    )
    assert 0.35 < before["sentiment"] < 0.6
    assert after["sentiment"] - before["sentiment"] > 0.15
    assert abs(after["base_log_prob"] - before["base_log_prob"]) < 0.5


def test_a_loop_of_ones_own_teaches_a_model_to_sort_letters(
    run: Callable[..., str], tmp_path: Path
) -> None:
    """Own_loop.py as its docstring says, on a model that has seen some of the data."""
    sft = """--pretrain data/model --dataset data/sft.jsonl --save_path sft --seed 1 --learning_rate 2e-3 --max_steps 42
        --train_batch_size 32 --micro_train_batch_size 16 --max_len 32"""
    run(
        [
            sys.executable,
            str(REPO / "examples/sort_letters.py"),
            *"make --out data --seed 1".split(),
        ],
        tmp_path,
    )
    run([sys.executable, "-m", "openppo.cli.train_sft", *sft.split()], tmp_path)
    arguments = "--model sft --data data --save_path trained --steps 20".split()
    printed = run([sys.executable, str(REPO / "examples/own_loop.py"), *arguments], tmp_path)
    rewards = [
        float(number)
        for number in re.findall(r"^step \d+: reward ([\d.]+), KL", printed, flags=re.MULTILINE)
    ]
    assert len(rewards) == 20
    before, after = map(
        float, re.findall(r"^exact match \w+ ([\d.]+)$", printed, flags=re.MULTILINE)
    )
    assert rewards[-1] - rewards[0] > 0.1
    assert after - before > 0.1
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "trained") for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    answer = model.generate(
        **tokenizer("hgfed>", return_tensors="pt"), max_new_tokens=16, do_sample=False
    )
    assert len(tokenizer.decode(answer[0], skip_special_tokens=True)) > len("hgfed>")
