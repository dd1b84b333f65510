"""A trainer on trajectories of the caller's: no prompts, no rewards; checkpoints and resume as with its own."""

from collections.abc import Callable
from pathlib import Path

from tests.distributed.runs import left_by

PROGRAM = """
import json, sys
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.trainer import build_ppo_trainer
from openppo.types import FinishReason, Prompt, Trajectory

class FromList:  # steps of four trajectories, of which each rank takes its share; evaluation by a fixed one
    def __init__(self, steps):
        self.steps, self.next, self.versions = steps, 0, []

    def __iter__(self):
        rank, world = trainer.comm.rank, trainer.comm.world_size
        while True:
            self.next += 1
            yield [trajectory(4 * self.next + i) for i in range(4)][rank::world]

    def publish(self, version):
        self.versions.append(version)

    def evaluate(self):
        return [trajectory(1)]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def close(self):
        print("closed at", self.next, self.versions)

def trajectory(number):
    ids = [3 + (number + t) % 8 for t in range(6)]
    mask = [False, False, True, True, False, True]  # two spans: a tool answered in between
    prompt = Prompt("", ids[:2])
    return Trajectory(ids, mask, [-2.0 * m for m in mask], [0 if m else -1 for m in mask], FinishReason.LENGTH,
                      prompt, number, scores={"score": float(number % 5)})

config = parse_options(TrainPPOConfig, sys.argv[2:])
source = FromList(None if sys.argv[1] == "None" else int(sys.argv[1]))
trainer = build_ppo_trainer(config, source=source)
print("of", trainer.total_steps)
trainer.fit()
trainer.close()
"""


FLAGS = "--pretrain {tiny}/actor --rollout_batch_size 4 --train_batch_size 4 --generate_max_len 6"


def test_a_source_from_a_list_trains_checkpoints_and_resumes(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(name: str, source_steps: object, *more: str) -> str:
        flags = f"""{FLAGS} --micro_train_batch_size 2 --save_steps 1 --actor_learning_rate 1e-3
            --critic_learning_rate 1e-3 --lr_scheduler constant --save_path {tmp_path / name}"""
        words = flags.replace("{tiny}", str(tiny)).split()
        return launch(2, tmp_path / "program.py", str(source_steps), *words, *more)

    printed = run("whole", 6, "--max_steps", "4")
    assert "of 4" in printed
    assert "closed at 4 [1, 2, 3, 4]" in printed
    assert "of 2" in run("parts", 2)
    assert "of 4" in run("parts", None, "--max_steps", "4", "--load_checkpoint")
    whole, parts = (left_by(tmp_path / name) for name in ("whole", "parts"))
    assert [line["step"] for line in whole.metrics] == [1, 2, 3, 4]
    unevaluated = [[{k: v for k, v in line.items() if "eval" not in k} for line in r.metrics] for r in (whole, parts)]
    assert unevaluated[0] == unevaluated[1]
    assert whole.metrics[-1]["eval_reward"] == 1.0
    assert whole.state["trainer"]["source"] == {"next": 4}
    weights = [{n: f for n, f in run.files.items() if "random" not in n} for run in (whole, parts)]
    assert weights[0] == weights[1]


def test_a_source_of_unknown_length_needs_max_steps(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [*FLAGS.replace("{tiny}", str(tiny)).split(), "--save_path", str(tmp_path / "model")]
    output = launch(0, tmp_path / "program.py", "None", *words, status=1)
    assert "ValueError: --max_steps is missing: the source of trajectories does not say how many steps" in output
