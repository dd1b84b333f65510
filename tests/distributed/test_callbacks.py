"""What callbacks see of a run on two ranks, and how they end it."""

import json
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
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
    callbacks = [recorder] if name == "one_rank" else [recorder, EarlyStopping("eval_reward", patience=2)]
    config = parse_options(TrainPPOConfig, [*sys.argv[1:], "--save_path", folder, *more])
    trainer = build_ppo_trainer(config, DeepspeedStrategy(config.deepspeed), callbacks)
    trainer.fit()
    Path(f"{name}_{trainer.comm.rank}.json").write_text(json.dumps(recorder.calls))
trainer.close()
"""


def test_callbacks_see_every_point_of_a_run_alike_on_all_ranks_and_end_it(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    """The policy stays as it is, so evaluation finds no gain."""
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --input_key input --generate_max_len 6
        --eval_data {tiny}/prompts.jsonl --eval_steps 1 --eval_before_training --max_samples 8 --num_episodes 4
        --verifiable_reward length --verify_length 3 --init_kl_coef 0 --advantage_estimator reinforce
        --rollout_batch_size 4 --train_batch_size 4 --actor_learning_rate 0"""
    launch(2, "program.py", *arguments.split(), cwd=tmp_path)
    calls = {}
    for run in ("early", "one_rank", "again"):
        calls[run], other = (json.loads((tmp_path / f"{run}_{rank}.json").read_text()) for rank in (0, 1))
        assert calls[run] == other
    early = calls["early"]
    seen = "on_fit_start on_evaluate on_evaluate on_step_end on_evaluate on_step_end on_save on_fit_end"
    assert [call[0] for call in early] == seen.split()
    assert [call[1] for call in early if call[0] == "on_evaluate"] == [0, 1, 2]
    assert len({call[2] for call in early if call[0] == "on_evaluate"}) == 1
    assert early[-2][2] is True, "the model is there when on_save is called"
    assert [call[1] for call in calls["one_rank"] if call[0] == "on_step_end"] == [1], "one rank ends it for all"
    assert calls["one_rank"][-1] == ["on_fit_end"]
    assert [call[0] for call in calls["again"]] == ["on_fit_start", "on_save", "on_fit_end"], "it stays ended"
