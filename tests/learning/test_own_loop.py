"""The example of a loop of one's own, run as its docstring says: it teaches a half-trained model to sort letters."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO = Path(__file__).parents[2]
Run = Callable[..., str]
STEPS = 20
SFT = """--pretrain data/model --dataset data/sft.jsonl --save_path sft --seed 1 --learning_rate 2e-3 --max_steps 42
    --train_batch_size 32 --micro_train_batch_size 16 --max_len 32"""


@pytest.fixture(scope="module")
def workshop(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data`` of the quickstart, and ``sft``, a model that has seen some of them."""
    folder = tmp_path_factory.mktemp("own_loop")
    run([sys.executable, str(REPO / "examples/sort_letters.py"), *"make --out data --seed 1".split()], folder)
    run([sys.executable, "-m", "openppo.cli.train_sft", *SFT.split()], folder)
    return folder


def test_a_loop_of_ones_own_teaches_a_model_to_sort_letters(run: Run, workshop: Path) -> None:
    arguments = f"--model sft --data data --save_path trained --steps {STEPS}".split()
    printed = run([sys.executable, str(REPO / "examples/own_loop.py"), *arguments], workshop)
    rewards = [float(number) for number in re.findall(r"^step \d+: reward ([\d.]+), KL", printed, flags=re.MULTILINE)]
    assert len(rewards) == STEPS
    before, after = map(float, re.findall(r"^exact match \w+ ([\d.]+)$", printed, flags=re.MULTILINE))
    assert rewards[-1] - rewards[0] > 0.1
    assert after - before > 0.1

    model, tokenizer = (auto.from_pretrained(workshop / "trained") for auto in (AutoModelForCausalLM, AutoTokenizer))
    answer = model.generate(**tokenizer("hgfed>", return_tensors="pt"), max_new_tokens=16, do_sample=False)
    assert len(tokenizer.decode(answer[0], skip_special_tokens=True)) > len("hgfed>")
