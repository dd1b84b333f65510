"""Long responses on one rank: the forwards of experience are dealt over the ranks, and nothing else changes."""

import json

import pytest
import torch

PROGRAM = """
import json, math, sys
import torch
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.models import dealing
from openppo.trainer import build_ppo_trainer
from openppo.types import FinishReason, Prompt, Sample, Segment

def make_sample(number):  # twelve: two of each group, groups 0 to 2 long, 3 to 5 short
    n = (40, 8)[number // 6] + number % 3
    ids = [3 + (number * number + t) % 8 for t in range(n)]
    mask = [t >= 3 + number % 2 for t in range(n)]
    segment = Segment(ids, mask, [-2.0 * m for m in mask], versions=[0 if m else -1 for m in mask], n_prompt=3,
                      finish_reason=FinishReason.LENGTH)
    scores = {"score": float(number * number % 5)}
    return Sample(Prompt("", ids[:3]), number // 2, [segment], scores=scores)

def counted(model, widths):
    def call(inputs, *masks, **options):
        widths.append([inputs.sequences.shape[1], int(inputs.attention_mask.sum())])
        return model(inputs, *masks, **options)
    return call

for worth in (dealing._WORTH_DEALING, math.inf):
    dealing._WORTH_DEALING = worth
    trainer = build_ppo_trainer(parse_options(TrainPPOConfig, sys.argv[1:]))
    comm, maker, forwards = trainer.comm, trainer.maker, {}
    for name in ("actor", "critic", "reference"):
        if (model := getattr(maker, name)) is not None:
            setattr(maker, name, counted(model, forwards.setdefault(name, [])))
    size = 12 // comm.world_size
    samples = [make_sample(number) for number in range(12)][comm.rank * size :][:size]
    metrics = trainer.train_on(samples)
    with trainer.components.actor.gathered():
        weights = [w.double().flatten() for w in trainer.components.actor.module.parameters()]
        weights = torch.cat(weights).tolist()
    own = [item.sequences[0].tolist() for item in trainer.replay_buffer.items]
    assert own == [sample.last.token_ids for sample in samples], "experience stays on its rank"
    found = comm.all_gather_object(forwards)
    if comm.rank == 0:
        print("RESULT" + json.dumps({"forwards": found, "metrics": metrics, "weights": weights}))
trainer.close()
"""
OPTIONS = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --reward_pretrain {tiny}/reward --zero_stage 3
    --rollout_batch_size 6 --n_samples_per_prompt 2 --train_batch_size 6 --micro_rollout_batch_size 2
    --actor_learning_rate 1e-3 --generate_max_len 48 --lr_warmup_ratio 0"""
ESTIMATORS = {
    "gae": "--normalize_reward running",
    "group_norm": "--advantage_estimator group_norm --overlong_filter",
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_long_responses_of_one_rank_are_shared_and_change_nothing(
    estimator, tiny, tmp_path, launch
):
    (tmp_path / "program.py").write_text(PROGRAM)
    flags = f"{OPTIONS} {ESTIMATORS[estimator]} --save_path {tmp_path}/model".replace(
        "{tiny}", str(tiny)
    ).split()
    found = {}
    for n in (1, 2):
        lines = launch(n, tmp_path / "program.py", *flags, cwd=tmp_path).splitlines()
        found[n] = [
            json.loads(line.removeprefix("RESULT")) for line in lines if line.startswith("RESULT")
        ]
    (dealt, kept), (alone, alone_too) = found[2], found[1]
    for result, tokens in ((dealt, (150, 150)), (kept, (246, 54))):
        for name in result["forwards"][0]:
            of_ranks = [of_rank[name] for of_rank in result["forwards"]]
            assert len(of_ranks[0]) == len(of_ranks[1]) == 3, "equally many forwards"
            assert (
                tuple(sum(n for width, n in widths if width > 2) for widths in of_ranks) == tokens
            )
        metrics = result["metrics"]
        assert metrics["speed/experience_imbalance"] == pytest.approx(max(tokens) / 150 - 1)
        assert metrics["speed/training_tokens_per_s"] * metrics["time/training_s"] == pytest.approx(
            300
        )
        assert 0 <= metrics["speed/training_imbalance"] <= 42 / 150, (
            "each of two steps is even up to the longest row"
        )
    assert alone == alone_too | {"metrics": alone["metrics"]}
    for result in (dealt, kept):
        for name in (name for name in alone["metrics"] if not name.startswith(("time/", "speed/"))):
            assert result["metrics"][name] == pytest.approx(
                alone["metrics"][name], rel=1e-4, abs=1e-6
            ), name
        # Adam makes whole updates of 1e-3 of the smallest gradients too, so one weight may show what rounding is.
        differences = (torch.tensor(result["weights"]) - torch.tensor(alone["weights"])).abs()
        print(
            f"weights differ by {differences.max():.1e} at most, {differences.mean():.1e} on average"
        )
        assert differences.max() < 1e-4
        assert differences.mean() < 1e-7
