"""The check of the engine in real runs: it stops what would be sampled wrongly, and changes nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, RobertaConfig, RobertaForCausalLM


def arguments(tiny: Path, pretrain: Path, model: Path, more: str) -> list[str]:
    options = f"""--pretrain {pretrain} --critic_pretrain {tiny}/actor --reward_pretrain {tiny}/reward
        --prompt_data {tiny}/prompts.jsonl --max_samples 8 --rollout_batch_size 4 --train_batch_size 4
        --generate_max_len 8 --save_steps 2 --save_path {model} --actor_learning_rate 1e-2 --seed 3"""
    return ["-m", "openppo.cli.train_ppo", *options.split(), *more.split()]


def test_training_is_the_same_with_and_without_it(
    tiny: Path, tmp_path: Path, launch: Callable[..., str], left_by: Callable[[Path], Any]
) -> None:
    runs, more = [], "--zero_stage 3 --lora_rank 2 --lora_dropout 0.3"
    for check in ("on", "off"):
        launch(2, *arguments(tiny, tiny / "actor", tmp_path / check / "model", f"{more} --engine_check {check}"))
        runs.append(left_by(tmp_path / check / "model"))
    assert runs[0].metrics == runs[1].metrics and len(runs[0].metrics) == 2
    assert (runs[0].tokens, runs[0].files) == (runs[1].tokens, runs[1].files)


def test_wrong_positions_end_both_ranks_with_one_line(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> None:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "actor")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(vocab_size=len(tokenizer), is_decoder=True, initializer_range=0.2, **sizes)
    RobertaForCausalLM(config).save_pretrained(tmp_path / "roberta")
    tokenizer.save_pretrained(tmp_path / "roberta")
    refused = arguments(tiny, tmp_path / "roberta", tmp_path / "model", "--zero_stage 3")
    output = launch(2, *refused, status=1)
    assert output.count("cannot be sampled by --rollout_engine hf as it is trained") == 1
    assert "--engine_check off" in output
