"""Programs of users: samples of their own, and callbacks."""

import json

import torch
from safetensors.torch import load_file

from tests.distributed.runs import left_by, logged

OWN_SOURCE = """
import json, sys
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.trainer import build_ppo_trainer
from openppo.types import FinishReason, Prompt, Sample, Segment

class FromList:  # steps of four samples, of which each rank takes its share; evaluation by a fixed one
    def __init__(self, steps):
        self.steps, self.next, self.versions = steps, 0, []

    def __iter__(self):
        rank, world = trainer.comm.rank, trainer.comm.world_size
        while True:
            self.next += 1
            yield [make_sample(4 * self.next + i) for i in range(4)][rank::world]

    def publish(self, version):
        self.versions.append(version)

    def evaluate(self):
        return [make_sample(1)]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def close(self):
        print("closed at", self.next, self.versions)

def make_sample(number):
    ids = [3 + (number + t) % 8 for t in range(6)]
    mask = [False, False, True, True, False, True]  # two spans: a tool answered in between
    segment = Segment(ids, mask, [-2.0 * m for m in mask], versions=[0 if m else -1 for m in mask], n_prompt=2,
                      finish_reason=FinishReason.LENGTH)
    return Sample(Prompt("", ids[:2]), number, [segment], scores={"score": float(number % 5)})

config = parse_options(TrainPPOConfig, sys.argv[2:])
source = FromList(None if sys.argv[1] == "None" else int(sys.argv[1]))
trainer = build_ppo_trainer(config, source=source)
print("of", trainer.total_steps)
trainer.fit()
trainer.close()
"""


def test_a_source_from_a_list_trains_checkpoints_and_resumes(tiny, tmp_path, launch):
    (tmp_path / "program.py").write_text(OWN_SOURCE)

    def run(name: str, source_steps: object, *more: str, status: int = 0) -> str:
        flags = f"""--pretrain {tiny}/actor --rollout_batch_size 4 --train_batch_size 4 --generate_max_len 6
            --micro_train_batch_size 2 --save_steps 1 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3
            --lr_scheduler constant --save_path {tmp_path / name}"""
        return launch(
            2, tmp_path / "program.py", source_steps, *flags.split(), *more, status=status
        )

    printed = run("whole", 6, "--max_steps", "4")
    assert "of 4" in printed
    assert "closed at 4 [1, 2, 3, 4]" in printed
    assert "of 2" in run("parts", 2)
    assert "of 4" in run("parts", None, "--max_steps", "4", "--load_checkpoint")
    whole, parts = (left_by(tmp_path / name) for name in ("whole", "parts"))
    assert [line["step"] for line in whole.metrics] == [1, 2, 3, 4]
    first, second = (
        [
            {k: v for k, v in line.items() if "eval" not in k and k != "episode"}
            for line in run.metrics
        ]
        for run in (whole, parts)
    )
    assert first == second, "but for episodes, which are shares of the steps that were planned"
    assert whole.metrics[-1]["eval_reward"] == 1.0
    assert whole.state["trainer"]["source"] == {"next": 4}
    weights = [{n: f for n, f in run.files.items() if "random" not in n} for run in (whole, parts)]
    assert weights[0] == weights[1]
    missing = (
        "ValueError: --max_steps is missing: the source of samples does not say how many steps"
    )
    assert missing in run("endless", None, status=1)


CALLBACKS = """
import json, sys
from pathlib import Path
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import build_ppo_trainer
from openppo.trainer.callbacks import Callback, EarlyStopping

class Recorder(Callback):  # notes every call and its numbers; rank 1 alone ends the run ``one_rank``
    def __init__(self):
        self.calls = []

    def on_fit_start(self, trainer):
        self.calls.append(["on_fit_start"])

    def on_step_end(self, trainer, metrics):
        self.calls.append(["on_step_end", trainer.global_step, metrics["reward"]])
        trainer.should_stop |= name == "one_rank" and trainer.global_step == 1 and trainer.comm.rank == 1

    def on_evaluate(self, trainer, metrics):
        self.calls.append(["on_evaluate", trainer.global_step, metrics["eval_reward"]])

    def on_save(self, trainer, folder):
        self.calls.append(["on_save", str(folder), (folder / "config.json").is_file()])

    def on_fit_end(self, trainer):
        self.calls.append(["on_fit_end"])

for name, more in {"early": [], "one_rank": [], "again": ["--load_checkpoint"]}.items():
    recorder, folder = Recorder(), "early" if name == "again" else name  # as after a kill while its model was saved
    callbacks = [recorder] if name == "one_rank" else [recorder, EarlyStopping("eval_reward", patience=1)]
    config = parse_options(TrainPPOConfig, [*sys.argv[1:], "--save_path", folder, *more])
    trainer = build_ppo_trainer(config, DeepspeedStrategy(config.deepspeed), callbacks)
    trainer.fit()
    Path(f"{name}_{trainer.comm.rank}.json").write_text(json.dumps(recorder.calls))
trainer.close()
"""


def test_callbacks_see_every_point_of_a_run_alike_on_all_ranks_and_end_it(tiny, tmp_path, launch):
    """The policy stays as it is, so evaluation finds no gain."""
    (tmp_path / "program.py").write_text(CALLBACKS)
    arguments = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --input_key input --generate_max_len 6
        --eval_data {tiny}/prompts.jsonl --eval_steps 1 --eval_before_training --max_samples 8 --num_episodes 4
        --verifiable_reward length:3 --init_kl_coef 0 --advantage_estimator reinforce
        --rollout_batch_size 4 --train_batch_size 4 --actor_learning_rate 0"""
    launch(2, "program.py", *arguments.split(), cwd=tmp_path)
    calls = {}
    for run in ("early", "one_rank", "again"):
        calls[run], other = (
            json.loads((tmp_path / f"{run}_{rank}.json").read_text()) for rank in (0, 1)
        )
        assert calls[run] == other
    early = calls["early"]
    seen = "on_fit_start on_evaluate on_evaluate on_step_end on_evaluate on_step_end on_save on_fit_end"
    assert [call[0] for call in early] == seen.split()
    assert [call[1] for call in early if call[0] == "on_evaluate"] == [0, 1, 2]
    assert len({call[2] for call in early if call[0] == "on_evaluate"}) == 1
    assert early[-2][2] is True, "the model is there when on_save is called"
    assert [call[1] for call in calls["one_rank"] if call[0] == "on_step_end"] == [1], (
        "one rank ends it for all"
    )
    assert calls["one_rank"][-1] == ["on_fit_end"]
    assert [call[0] for call in calls["again"]] == ["on_fit_start", "on_save", "on_fit_end"], (
        "it stays ended"
    )


STOPPED = """
import sys
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import build_ppo_trainer
from openppo.trainer.callbacks import Callback

class StopAtTwo(Callback):  # of the last rank alone
    def on_step_end(self, trainer, metrics):
        trainer.should_stop |= trainer.global_step == 2 and trainer.comm.rank == trainer.comm.world_size - 1

for folder, callbacks in (("whole", []), ("parts", [StopAtTwo()]), ("parts", [])):
    config = parse_options(TrainPPOConfig, [*sys.argv[1:], "--load_checkpoint", "--save_path", folder])
    trainer = build_ppo_trainer(config, DeepspeedStrategy(config.deepspeed), callbacks)
    trainer.fit()
    print(folder, "ended after step", trainer.global_step, flush=True)
trainer.close()
"""


def test_a_run_that_stops_at_a_step_that_is_not_due_resumes_exactly(tiny, tmp_path, launch):
    """Nothing is due at step 2: no evaluation, no checkpoint, no line of metrics."""
    (tmp_path / "program.py").write_text(STOPPED)
    arguments = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --input_key input --generate_max_len 6
        --eval_data {tiny}/prompts.jsonl --eval_steps 4 --save_steps 4 --logging_steps 4 --max_samples 16
        --verifiable_reward length:3 --advantage_estimator reinforce
        --rollout_batch_size 4 --train_batch_size 4 --actor_learning_rate 1e-3"""
    printed = launch(2, "program.py", *arguments.split(), cwd=tmp_path)
    assert "parts ended after step 2" in printed
    assert "parts ended after step 4" in printed

    assert [line["step"] for line in logged(tmp_path / "whole")] == [4]
    assert [line["step"] for line in logged(tmp_path / "parts")] == [2, 4]
    assert logged(tmp_path / "whole")[-1] == logged(tmp_path / "parts")[-1]
    weights = [load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
