"""--ref_pretrain: the KL penalty is measured from that model, with LoRA and without."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.trainer import build_ppo_trainer

config = parse_options(TrainPPOConfig, sys.argv[1:])
trainer = build_ppo_trainer(config)
trajectories = trainer.rollout([prompt for prompt in trainer.components.prompts[:4]])
found = trainer.train_on(trajectories)["kl"]
policy, reference = map(AutoModelForCausalLM.from_pretrained, (config.model.pretrain, config.model.ref_pretrain))

@torch.no_grad()
def log_probs(model, ids):
    return torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]

gaps = []
for trajectory in trajectories:
    ids, sampled = torch.tensor(trajectory.token_ids), torch.tensor(trajectory.action_mask).bool()[1:]
    gaps.append((log_probs(policy, ids) - log_probs(reference, ids))[sampled])
expected = torch.cat(gaps).mean().item()
assert abs(expected) > 0.01, expected
assert abs(found - expected) < 1e-4, (found, expected)
trainer.close()
"""


@pytest.mark.parametrize("more", ["--zero_stage 3", "--lora_rank 2"])
def test_the_penalty_is_measured_from_the_given_reference(
    more: str, tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    torch.manual_seed(11)
    other = shutil.copytree(tiny / "actor", tmp_path / "other")
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny / "actor")).save_pretrained(other)
    flags = f"""--pretrain {tiny}/actor --ref_pretrain {other} --prompt_data {tiny}/prompts.jsonl
        --verifiable_reward length --verify_length 3 --advantage_estimator reinforce --generate_max_len 6
        --rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2 --save_path {tmp_path}/model {more}"""
    (tmp_path / "program.py").write_text(PROGRAM)
    launch(0, tmp_path / "program.py", *flags.split())
