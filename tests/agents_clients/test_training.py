"""The stock program of openai-agents in examples/ trains a model over two ranks."""

import json
import shlex
import string

import pytest

from tests.distributed.runs import logged, vector
from tests.distributed.test_agent_programs import chat_model as chat_model
from tests.fork_server import REPO

REWARD = """
def reward_fn(response):
    return 0.1 + sum(letter.isupper() for letter in response)
"""


@pytest.mark.slow
def test_a_stock_agent_trains_a_model_and_imports_nothing_of_ours(
    client_python, chat_model, tmp_path, launch
):
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    script = REPO / "examples/agents/sums.py"
    assert "openppo" not in script.read_text()
    flags = f"""--pretrain {chat_model} --prompt_data sums.jsonl --input_key question --save_path trained
        --reward_fn reward.py --advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 4
        --train_batch_size 8 --generate_max_len 200 --episode_max_len 600 --init_kl_coef 0 --actor_learning_rate 1e-3"""
    flags += f" --stop {' '.join(string.ascii_lowercase)}"  # the package raises where a turn is cut off by its length
    command = f"{shlex.quote(client_python)} -I {script}"
    launch(
        2, "-m", "openppo.cli.train_ppo", *flags.split(), "--agent_command", command, cwd=tmp_path
    )
    metrics = logged(tmp_path / "trained")
    assert [line["step"] for line in metrics] == [1, 2]
    assert {line["agent/completed"] for line in metrics} == {1.0}
    assert all(line["reward"] > 0 for line in metrics)
    assert (vector(tmp_path / "trained") - vector(chat_model)).norm() > 0
