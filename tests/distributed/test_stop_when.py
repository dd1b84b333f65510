"""--stop_when on two ranks: the step ends, the model is saved, and one line says why."""

import json
from collections.abc import Callable
from pathlib import Path


def test_a_condition_ends_all_ranks_after_the_step(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> None:
    command = f"""-m openppo.cli.train_ppo --pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl
        --verifiable_reward length --verify_length 3 --advantage_estimator reinforce --generate_max_len 4
        --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 4 --actor_learning_rate 1e-3
        --save_path {tmp_path}/model""".split()
    said = launch(2, *command, "--stop_when", "reward > 99", "response_length > 0.5")
    assert said.count("--stop_when response_length > 0.5: response_length is") == 1
    assert (tmp_path / "model" / "model.safetensors").is_file()
    metrics = tmp_path / "model" / "logs" / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1]

    launch(2, *command, "--load_checkpoint", "--stop_when", "response_length > 0.5")  # it stays stopped
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1]

    said = launch(2, *command, "--load_checkpoint", "--stop_when", "reward > 99")
    assert "--stop_when response_length > 0.5 is not given any more: the run resumes" in said
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3]
