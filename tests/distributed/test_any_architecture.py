"""Granite, for which transformers has no classifier and whose embeddings are tied: both trainers on two ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig

from openppo.models import get_llm_for_sequence_regression

Launch = Callable[..., str]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def granite(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with the tokenizer of the others."""
    folder, tokenizer = tmp_path_factory.mktemp("granite"), AutoTokenizer.from_pretrained(tiny / "actor")
    torch.manual_seed(7)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = GraniteConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, initializer_range=0.2, **SIZES, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["--zero_stage 3", "--zero_stage 2 --lora_rank 4"], ids=["zero3", "lora"])
def rm_run(
    request: pytest.FixtureRequest, granite: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch
) -> Path:
    """A reward model of two parts: the run is resumed from its checkpoint."""
    folder = tmp_path_factory.mktemp("rm")
    arguments = f"""--pretrain {granite} --dataset {tiny}/preference.jsonl --eval_dataset {tiny}/preference.jsonl
        --prompt_key prompt --train_batch_size 26 --learning_rate 1e-2 {request.param}
        --save_path {folder}/model --ckpt_path {folder}/ckpt --save_steps 2"""
    for more in ("--max_epochs 2", "--max_epochs 4 --load_checkpoint"):
        launch(2, "-m", "openppo.cli.train_rm", *arguments.split(), *more.split())
    return folder


def test_the_saved_reward_model_scores_as_the_trained_one(rm_run: Path, tiny: Path) -> None:
    last = json.loads((rm_run / "model" / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4
    reward = get_llm_for_sequence_regression(str(rm_run / "model"), "reward").eval()
    tokenizer, chosen = AutoTokenizer.from_pretrained(rm_run / "model"), []
    for pair in map(json.loads, (tiny / "preference.jsonl").read_text().splitlines()):
        ids = torch.tensor([tokenizer.convert_tokens_to_ids([*pair["prompt"], *pair["chosen"], "<eos>"])])
        with torch.no_grad():
            chosen.append(reward(ids, torch.ones_like(ids)).item())
    assert last["eval_chosen_reward"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-4)


def test_ppo_trains_policy_and_critic_and_saves_what_it_read(
    rm_run: Path, granite: Path, tiny: Path, tmp_path: Path, launch: Launch
) -> None:
    arguments = f"""--pretrain {granite} --reward_pretrain {rm_run}/model --critic_pretrain {granite}
        --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 12 --train_batch_size 12 --generate_max_len 8
        --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --zero_stage 3 --save_value_network
        --save_path {tmp_path}/model"""
    output = launch(2, "-m", "openppo.cli.train_ppo", *arguments.split())
    assert "fresh scalar head for the critic" in output
    policy, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", granite))
    assert policy.keys() == before.keys()
    assert "lm_head.weight" not in policy
    assert not torch.equal(policy["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    critic = load_file(tmp_path / "model_critic" / "model.safetensors")
    assert critic.keys() == before.keys() | {"score.weight"}
    again = get_llm_for_sequence_regression(str(tmp_path / "model_critic"), "critic").model.state_dict()
    assert all(torch.equal(again[name], critic[name]) for name in critic)
