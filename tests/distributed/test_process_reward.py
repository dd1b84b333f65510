"""PPO with a process reward model; its training is a task of test_split.py."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_ppo_is_rewarded_for_each_step_by_a_process_reward_model(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    arguments = f"""--pretrain {tiny}/actor --prm_pretrain {tiny}/actor --prm_placeholder_token h
        --prm_reward_tokens a b --step_separator d --input_template c{{}}e --prompt_data {tiny}/prompts.jsonl
        --rollout_batch_size 24 --train_batch_size 24 --micro_rollout_batch_size 5 --generate_max_len 12
        --zero_stage 3 --save_path {tmp_path}/model"""
    launch(2, "-m", "openppo.cli.train_ppo", *arguments.split())
    logs = tmp_path / "model" / "logs"
    [metrics] = map(json.loads, (logs / "metrics.jsonl").read_text().splitlines())
    samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
    model, tokenizer = (auto.from_pretrained(tiny / "actor") for auto in (AutoModelForCausalLM, AutoTokenizer))
    good, bad = tokenizer.convert_tokens_to_ids(["a", "b"])
    for sample in samples:
        response = sample["response"].replace("<eos>", "").replace("<pad>", "").replace("<unk>", "")
        read, expected = sample["prompt"], 0.0
        for number, step in enumerate([step for step in response.split("d") if step]):
            read += ("d" if number else "") + step + "h"
            logits = model(**tokenizer(read, return_tensors="pt")).logits[0, -1]
            expected += logits[[good, bad]].softmax(-1)[0].item()
        assert sample["reward"] == pytest.approx(expected, abs=1e-4), sample
    assert len({sample["reward"] for sample in samples}) > 3
    assert 0 < metrics["reward"] < 3
