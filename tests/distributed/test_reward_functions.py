"""Reward functions of files in whole runs: what fails on every sample ends the run, and files import their helpers."""

import json

import pytest

from tests.distributed.test_agent_programs import chat_model  # noqa: F401 (a fixture)

OPTIONS = """--pretrain {model} --prompt_data prompts.jsonl --input_key question --save_path trained
    --advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 4 --train_batch_size 8
    --generate_max_len 8 --init_kl_coef 0 --max_steps 2 --reward_fn rewards/limited.py"""
LIMITED = """
import signal
from lengths import length

def late(*_):
    raise TimeoutError

def reward_fn(response):
    signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        return length(response)
    finally:
        signal.alarm(0)
"""
ASYNC = "--max_staleness 1 --policy_loss_type decoupled"


@pytest.fixture
def folder(tmp_path, chat_model):  # noqa: F811
    """A folder with prompts and a reward function that needs the main thread, and the flags that all runs share."""
    rows = [{"question": f"room {i}"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "limited.py").write_text(LIMITED)
    (tmp_path / "rewards" / "lengths.py").write_text(
        "def length(text):\n    return float(len(text))\n"
    )
    return tmp_path, OPTIONS.format(model=chat_model).split()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="synchronous"),
        pytest.param(f"{ASYNC} --rollout_ranks 1", id="rollout_ranks"),
        pytest.param(ASYNC, id="overlap", marks=pytest.mark.slow),
        pytest.param(
            "--dynamic_sampling 1",
            id="dynamic",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_fails_on_all_samples_ends_the_run(folder, launch, flags):
    place, options = folder
    options = [*options, "--reward_error_value", "0", *flags.split()]
    printed = launch(2, "-m", "openppo.cli.train_ppo", *options, cwd=place, status=1)
    report = printed[printed.index("OpenPPO: the run has failed") :]
    assert "signal only works in main thread" in report and "--reward_workers 1" in report
    assert "--load_checkpoint" in report and "saved the trained model" not in printed
    assert (place / "trained" / "checkpoints_ppo" / "latest" / "state.json").exists()


def test_a_process_has_the_main_thread_and_the_helpers_of_the_file(folder, launch):
    place, options = folder
    printed = launch(2, "-m", "openppo.cli.train_ppo", *options, "--reward_workers", "1", cwd=place)
    assert "saved the trained model" in printed
