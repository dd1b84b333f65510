"""A default PPO step runs through few files of the package: who reads it opens no more."""

from collections.abc import Callable
from pathlib import Path

from tests.fork_server import REPO
from tests.rules.limits import STEP_FILE_LINES, STEP_FILES

PROGRAM = """
import sys, threading
from openppo.config import TrainPPOConfig, from_options
from openppo.trainer import build_ppo_trainer

tiny, second_step, files = sys.argv[1], threading.Event(), set()

def profile(frame, event, argument):
    if second_step.is_set():
        files.add(frame.f_code.co_filename)

threading.setprofile(profile)
sys.setprofile(profile)
trainer = build_ppo_trainer(from_options(
    TrainPPOConfig, pretrain=tiny + "/actor", reward_pretrain=tiny + "/reward", prompt_data=tiny + "/prompts.jsonl",
    rollout_batch_size=8, train_batch_size=8, generate_max_len=8, save_path="model",
))
first, second, *_ = trainer.prompt_batches()
trainer.step(first)
second_step.set()
trainer.step(second)
second_step.clear()
trainer.close()
print(*(name for name in files if "/openppo/" in name), sep="\\n")
"""


def test_a_default_step_runs_through_few_and_short_files(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    printed = launch(0, "-c", PROGRAM, tiny, cwd=tmp_path).splitlines()
    files = {name: Path(name).read_text() for name in sorted(printed) if name.startswith(f"{REPO}/openppo/")}
    sizes = {name.removeprefix(f"{REPO}/"): len(text.splitlines()) for name, text in files.items()}
    print(*sorted(sizes.items()), sep="\n")
    assert 20 < len(sizes) <= STEP_FILES
    assert {name: n for name, n in sizes.items() if n > STEP_FILE_LINES} == {}
