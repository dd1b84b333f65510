"""Ids that are never sampled, in whole runs: log-probs of sampling and training are of the same distribution."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.runs import logged

PPO = """--verifiable_reward length:4 --rollout_batch_size 8 --train_batch_size 4 --generate_max_len 8
    --micro_train_batch_size 2 --micro_rollout_batch_size 2 --max_steps 2 --actor_learning_rate 1e-3 --init_kl_coef 0.1
    --advantage_estimator reinforce --entropy_coef 0.01 --num_episodes 2 --save_path {folder}/model"""
IMAGES = "--pretrain {tiny}/llava --prompt_data {tiny}/llava/images.jsonl --image_key images"
ROUNDING = 1e-5
"""Nats: log-probs of about 4 in float32."""

Launch = Callable[..., str]


def train(launch: Launch, options: str, ranks: int = 1, status: int = 0, **places: Path) -> str:
    words = f"-m openppo.cli.train_ppo {PPO} {options}".format(**places).split()
    return launch(ranks, *words, cwd=places["folder"], status=status)


def save_padded(folder: Path, start: Path, n_more: int = 13) -> Path:
    """The model of ``start`` with ``n_more`` ids that its tokenizer does not know, which are likely."""
    model = AutoModelForCausalLM.from_pretrained(start)
    torch.manual_seed(4)
    model.resize_token_embeddings(model.config.vocab_size + n_more, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[-n_more:].normal_(std=0.4)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ""),
        (2, "--zero_stage 3"),
        (1, "--old_log_probs recompute --n_samples_per_prompt 2"),
        (1, "--lora_rank 4"),
    ],
)
def test_after_images_the_log_prob_gap_is_rounding(
    ranks: int, more: str, tiny: Path, tmp_path: Path, launch: Any
):
    output = train(launch, f"{IMAGES} {more}", ranks, tiny=tiny, folder=tmp_path)
    steps = [row for row in logged(tmp_path / "model") if "rollout_log_prob_gap_max" in row]
    assert len(steps) == 2
    assert max(row["rollout_log_prob_gap_max"] for row in steps) < ROUNDING
    assert re.search(r"never sampled +ids 3 \(images\)", output)


@pytest.mark.parametrize("more", ["", "--zero_stage 3", "--lora_rank 4"])
def test_ids_beyond_the_tokenizer_are_neither_sampled_nor_trained(
    more: str, tiny: Path, tmp_path: Path, launch: Launch
) -> None:
    start = save_padded(tmp_path / "padded", tiny / "actor")
    n_known = len(AutoTokenizer.from_pretrained(start))
    options = (
        f"--pretrain {start} --prompt_data {tiny}/prompts.jsonl --old_log_probs recompute {more}"
    )
    output = train(launch, f"{options} --dump_rollouts {tmp_path}/rollouts", folder=tmp_path)
    assert "ids 13 that the tokenizer does not know, up to 23" in output
    steps = [row for row in logged(tmp_path / "model") if "rollout_log_prob_gap_max" in row]
    assert max(row["rollout_log_prob_gap_max"] for row in steps) < ROUNDING
    files = (tmp_path / "rollouts").glob("train*.jsonl")
    dumped = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(dumped) == 16
    segments = [segment for row in dumped for segment in row["segments"]]
    assert max(token_id for segment in segments for token_id in segment["token_ids"]) < n_known
    if "lora" not in more:
        before, after = (
            load_file(place / "model.safetensors") for place in (start, tmp_path / "model")
        )
        rows, new_rows = before["lm_head.weight"], after["lm_head.weight"]
        assert torch.equal(rows[n_known:], new_rows[n_known:])
        assert not torch.equal(rows[:n_known], new_rows[:n_known])


def test_a_stop_token_that_is_never_sampled_is_refused(
    tiny: Path, tmp_path: Path, launch: Launch
) -> None:
    start = save_padded(tmp_path / "padded", tiny / "actor")
    options = f"--pretrain {start} --prompt_data {tiny}/prompts.jsonl --stop_token_ids 20"
    output = train(launch, options, status=1, folder=tmp_path)
    assert (
        "--stop_token_ids: the id 20 is never sampled, as the tokenizer does not know it. Leave it out, or use another "
        "id."
    ) in output
