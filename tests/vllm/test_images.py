"""What vLLM samples after images, against forwards of transformers with the same weights; PPO with it."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from openppo.models.media_inputs import media_inputs
from openppo.models.vision_models import placeholders
from openppo.rollout.vllm_requests import IMAGE_FAMILIES
from openppo.types import ModelInputs
from tests.images import FAMILIES, IMAGE, load, pictures, processor_of
from tests.vllm import test_vllm
from tests.vllm.images import prompts

TORCHRUN, SCRIPT = "torchrun --standalone --nproc_per_node", Path(__file__).with_name("images.py")
ENVIRONMENT = {
    "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH')}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Heads of 32 dimensions are the fewest for vLLM on CPUs."""
absent = importlib.util.find_spec("torchvision") is None
pytestmark = [
    *test_vllm.pytestmark,
    pytest.mark.skipif(absent, reason="no torchvision; docs/vllm.md says how"),
]


def save(family, folder):
    """A tiny model with its processor."""
    config = FAMILIES[family]().config
    for name, value in WIDE.items():
        setattr(config.text_config, name, value)
    if family.startswith("qwen"):
        config.text_config.rope_parameters["mrope_section"] = [4, 4, 8]
        config.vision_config.out_hidden_size = WIDE["hidden_size"]
    torch.manual_seed(7)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor_of(family).save_pretrained(folder)


@torch.no_grad()
def log_probs(folder, ids, media, completion):
    """Of a sampled response where tokens of images are not sampled."""
    model, whole = (
        AutoModelForImageTextToText.from_pretrained(folder),
        torch.tensor([[*ids, *completion["token_ids"]]]),
    )
    logits = model(
        input_ids=whole, **media_inputs(model, ModelInputs(whole, whole > -1, (media,)))
    ).logits[0, len(ids) - 1 : -1]
    logits[:, [*placeholders(model.config)]] = -torch.inf
    return logits.log_softmax(-1).gather(-1, whole[0, len(ids) :, None])[:, 0].tolist()


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_log_probs_after_images_are_those_of_transformers(family, tmp_path, run):
    """Before and after a change of weights; in a first turn and, with what was read before, in a second."""
    save(family, tmp_path / family)
    run(f"{TORCHRUN} 1 {SCRIPT} {tmp_path} {family}", tmp_path, **ENVIRONMENT)
    given = prompts(family)
    result = json.loads((tmp_path / f"{family}.json").read_text())
    for folder, (first, longer, second) in zip((family, f"{family}-changed"), result, strict=True):
        for prompt, ids, answer, later in zip(given, longer, first, second, strict=True):
            for before, media, found in (
                (prompt.token_ids, prompt.media, answer),
                (ids, (*prompt.media, *given[0].media), later),
            ):
                expected = log_probs(tmp_path / folder, before, media, found)
                assert found["log_probs"] == pytest.approx(expected, abs=1e-4)
                assert IMAGE not in found["token_ids"]


@pytest.mark.parametrize(
    "options", ["--zero_stage 2", "--zero_stage 3 --vllm_tensor_parallel_size 2"]
)
def test_ppo_samples_after_images_with_the_weights_of_each_step(options, tmp_path, run):
    """Of two ranks; the dump is compared with forwards, and the metrics with the actor's log-probs."""
    save("llava", tmp_path / "llava")
    images = [str(tmp_path / f"{i}.png") for i in range(7)]
    for picture, file in zip(pictures(7), images, strict=True):
        picture.save(file)
    rows = [
        {"input": "ab", "images": []},
        *({"input": "<image>ab", "images": [file]} for file in images),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def reward_fn(response):\n    return response.count('a')\n"
    )
    arguments = f"""--rollout_engine vllm --pretrain {tmp_path}/llava --prompt_data {tmp_path}/rows.jsonl
        --image_key images --reward_fn {tmp_path}/reward.py --rollout_batch_size 8 --train_batch_size 16
        --n_samples_per_prompt 2 --micro_train_batch_size 4 --generate_max_len 8 --prompt_max_len 16 --num_episodes 2
        --advantage_estimator group_norm --actor_learning_rate 1e-2 --lr_scheduler constant --lr_warmup_ratio 0
        --init_kl_coef 0 --no_freeze_vision_tower {options} --save_steps 1 --save_hf_ckpt
        --dump_rollouts {tmp_path}/rollouts --save_path {tmp_path}/model"""
    run(f"{TORCHRUN} 2 -m openppo.cli.train_ppo {arguments}", tmp_path, **ENVIRONMENT)
    media = [prompt.media for prompt in load(processor_of("llava"), rows)]
    dumped = [
        row
        for rank in range(2)
        for row in test_vllm.lines(tmp_path / f"rollouts/train-rank0000{rank}-00000.jsonl")
    ]
    assert len(dumped) == 32
    steps = test_vllm.lines(tmp_path / "model/logs/metrics.jsonl")
    assert (
        max(row["rollout_log_prob_gap_max"] for row in steps if "rollout_log_prob_gap_max" in row)
        < 1e-4
    )
    [saved] = (tmp_path / "model" / "checkpoints_ppo").glob("*1/model")
    for row in dumped:
        [segment] = row["segments"]
        n = segment["action_mask"].index(True)
        answer = {"token_ids": segment["token_ids"][n:]}
        folder = tmp_path / "llava" if row["step"] == 1 else saved
        expected = log_probs(folder, segment["token_ids"][:n], media[row["row"]], answer)
        assert segment["log_probs"][n:] == pytest.approx(expected, abs=1e-4)
