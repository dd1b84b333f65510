"""Adapters of train_sft are trained on by train_ppo, as the page on LoRA shows it."""

import json
from pathlib import Path
from typing import Any

from tests.docs.conftest import Run, train
from tests.docs.test_documents import MODELS, commands, tiny_words


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "logs/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_kl_is_measured_from_the_adapters_at_the_start(run: Run, workshop: Path) -> None:
    (sft,) = commands("lora", "train_sft")
    (ppo,) = (words for words in commands("lora") if "--lora_path" in words)
    small = "--train_batch_size 4 --micro_train_batch_size 2 --learning_rate 1e-2 --max_epochs 2"
    exact = "--old_log_probs recompute --actor_learning_rate 1e-2 --init_kl_coef 0.1".split()
    from_start = [*tiny_words(ppo), *exact]
    from_base = [*from_start, "--ref_pretrain", "policy", "--save_path", "ckpt/from_base"]
    lines = [
        ["train_sft", *(MODELS.get(word, word) for word in sft), *small.split()],
        ["train_ppo", *from_start],
        ["train_ppo", *from_base],
    ]
    train(run, workshop, lines)

    first, second = (row["kl"] for row in metrics(workshop / "ckpt/ppo_lora"))
    assert first == 0
    assert second != 0
    assert abs(metrics(workshop / "ckpt/from_base")[0]["kl"]) > 1e-3

    described = json.loads((workshop / "ckpt/ppo_lora/adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (16, 32)
    assert described["base_model_name_or_path"] == str(workshop / "policy")
    logged = (workshop / "ckpt/ppo_lora/logs/config.yaml").read_text()
    assert "lora_rank: 16" in logged
