"""The examples keep what README and their docstrings claim: the quickstart, a loop of one's own, happier stories."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = Path(__file__).parents[2]


def bash(script: str, *words: str, **variables: str) -> str:
    """What a script to copy prints."""
    command = ["bash", str(REPO / "examples/scripts" / script), *words]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=3600)
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
        stories.evaluate(policy, model, heldout, new_tokens=96, seed=0) for policy in (model, str(tmp_path / "happy"))
    )
    assert 0.35 < before["sentiment"] < 0.6
    assert after["sentiment"] - before["sentiment"] > 0.15
    assert abs(after["base_log_prob"] - before["base_log_prob"]) < 0.5


def test_a_loop_of_ones_own_teaches_a_model_to_sort_letters(run: Callable[..., str], tmp_path: Path) -> None:
    """Own_loop.py as its docstring says, on a model that has seen some of the data."""
    sft = """--pretrain data/model --dataset data/sft.jsonl --save_path sft --seed 1 --learning_rate 2e-3 --max_steps 42
        --train_batch_size 32 --micro_train_batch_size 16 --max_len 32"""
    run([sys.executable, str(REPO / "examples/sort_letters.py"), *"make --out data --seed 1".split()], tmp_path)
    run([sys.executable, "-m", "openppo.cli.train_sft", *sft.split()], tmp_path)
    arguments = "--model sft --data data --save_path trained --steps 20".split()
    printed = run([sys.executable, str(REPO / "examples/own_loop.py"), *arguments], tmp_path)
    rewards = [float(number) for number in re.findall(r"^step \d+: reward ([\d.]+), KL", printed, flags=re.MULTILINE)]
    assert len(rewards) == 20
    before, after = map(float, re.findall(r"^exact match \w+ ([\d.]+)$", printed, flags=re.MULTILINE))
    assert rewards[-1] - rewards[0] > 0.1
    assert after - before > 0.1
    model, tokenizer = (auto.from_pretrained(tmp_path / "trained") for auto in (AutoModelForCausalLM, AutoTokenizer))
    answer = model.generate(**tokenizer("hgfed>", return_tensors="pt"), max_new_tokens=16, do_sample=False)
    assert len(tokenizer.decode(answer[0], skip_special_tokens=True)) > len("hgfed>")
