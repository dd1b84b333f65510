"""Process reward models: the mean over all judged steps, however split; reward models: mean and std of their scores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from openppo.config import BatchConfig, ProcessConfig, SupervisedConfig, TrainPRMConfig, TrainRMConfig
from openppo.datasets import PreferenceExample, ProcessExample
from openppo.models.scalar_head import ProcessRewardModel, ScalarHeadModel
from openppo.tracking import Metrics, Trackers
from openppo.trainer.supervised.loop import SupervisedComponents
from openppo.trainer.supervised.trainers import ProcessRewardTrainer, RewardModelTrainer
from openppo.types import SingleProcess
from tests.unit.trainer.conftest import OneOf, PlainModel, Record, StopIn, Strategy

TOKENS = ["<pad>", "#", "+", "-", *"abcdefghijklmnop"]
PLACEHOLDER, GOOD, BAD, NO = 1, 2, 3, -100
HARD = [
    ProcessExample([5, 6, 1, 7, 1, 8, 9, 1], [NO, NO, GOOD, NO, BAD, NO, NO, GOOD]),
    ProcessExample([10, 1], [NO, BAD]),
    ProcessExample([11, 12, 13, 14], [NO, NO, NO, NO]),  # nothing judged
    ProcessExample([4, 1, 15, 1, 16], [NO, GOOD, NO, GOOD, NO]),
    ProcessExample([17, 18, 1], [NO, NO, BAD]),
]
SOFT = [
    ProcessExample(row.token_ids, [NO if label == NO else 0.31 + 0.1 * t for t, label in enumerate(row.labels)])
    for row in HARD
]


def trainer_of(causal: Any, examples: list[ProcessExample], micro: int, comm: Any = None) -> ProcessRewardTrainer:
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = TrainPRMConfig(
        SupervisedConfig("model", "data"),
        data=ProcessConfig(placeholder_token="#", reward_tokens=("+", "-")),
        batch=BatchConfig(train_batch_size=len(examples), micro_train_batch_size=micro),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>")
    strategy, model = Strategy(comm=comm or SingleProcess()), PlainModel(ProcessRewardModel(causal))
    parts: Any = SupervisedComponents(strategy, tokenizer, model, examples, examples, Trackers([]), Record())  # type: ignore[arg-type]
    return ProcessRewardTrainer(config, parts)


def judged_steps(model: LlamaForCausalLM, examples: list[ProcessExample]) -> list[tuple[Tensor, float]]:
    """Log-probs of (good, bad) and the probability of good that the label wants, of each step one by one."""
    steps = []
    for row in examples:
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
        for t, label in enumerate(row.labels):
            if label != NO:
                wanted = label if isinstance(label, float) else float(label == GOOD)
                steps.append((logits[t, [GOOD, BAD]].log_softmax(-1), wanted))
    return steps


def mean_loss(steps: list[tuple[Tensor, float]]) -> Tensor:
    assert len(steps) == 7
    return -sum(wanted * logp[0] + (1 - wanted) * logp[1] for logp, wanted in steps) / 7  # type: ignore[return-value]


@pytest.mark.parametrize("examples", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 2), (1, 9), (2, 1), (2, 2), (3, 1), (7, 4)])
def test_gradient_is_that_of_the_mean_over_steps_for_any_split(
    causal: LlamaForCausalLM, examples: list[ProcessExample], ranks: int, micro: int
) -> None:
    naive = mean_loss(judged_steps(causal, examples))
    expected = torch.autograd.grad(naive, list(causal.parameters()))
    total: Any = 0.0
    for rank in range(ranks):
        trainer = trainer_of(causal, examples, micro, OneOf(rank, ranks))
        batch = trainer.make_batch(examples)
        total += sum(trainer.loss(part, batch.n_targets, Metrics()) for part in batch.micro_batches)
    torch.testing.assert_close(total.item(), naive.item(), rtol=0, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(total, list(causal.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("examples", [HARD, SOFT], ids=["hard", "soft"])
def test_loss_and_accuracy_count_every_judged_step_once(
    causal: LlamaForCausalLM, examples: list[ProcessExample]
) -> None:
    trainer, steps = trainer_of(causal, examples, micro=2), judged_steps(causal, examples)
    right = [(logp[0] > logp[1]).item() == (wanted > 0.5) for logp, wanted in steps]
    assert 0 < sum(right) < len(steps)
    expected = {"eval_loss": mean_loss(steps).item(), "eval_accuracy": sum(right) / len(steps)}
    assert trainer.evaluate() == pytest.approx(expected, abs=1e-6)
    assert trainer.make_batch(examples).n_input_tokens == 8 + 2 + 4 + 5 + 3


PAIRS = [PreferenceExample([3 + i % 9] * (2 + i % 5), [9 - i % 7, 4]) for i in range(1025)]


@pytest.mark.parametrize(("n_train", "n_held_out", "used"), [(5, 0, 5), (5, 2, 2), (1025, 0, 513)])
def test_mean_and_std_are_of_held_out_or_spread_training_pairs(
    scalar: LlamaForSequenceClassification, n_train: int, n_held_out: int, used: int
) -> None:
    model, saved, data = ScalarHeadModel(scalar, "reward"), [], (PAIRS[:n_train], PAIRS[:n_held_out])
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    strategy = Strategy(save_pretrained=lambda *args: saved.append(args))
    parts: Any = SupervisedComponents(strategy, tokenizer, PlainModel(model), *data, Trackers([]), Record())  # type: ignore[arg-type]
    parts.stop = StopIn(1)  # a checkpoint upon a signal has the model whole
    config = TrainRMConfig(SupervisedConfig("model", "data"), batch=BatchConfig(4, micro_train_batch_size=3))
    RewardModelTrainer(config, parts).save()

    pairs = PAIRS[:n_held_out] or PAIRS[: n_train : 2 if n_train > 1024 else 1]
    assert len(pairs) == used
    rows = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = torch.stack([model(torch.tensor([ids]), torch.ones(1, len(ids)))[0] for ids in rows])
    assert scalar.config.mean == pytest.approx(scores.mean().item(), rel=1e-5)
    assert scalar.config.std == pytest.approx(scores.std().item(), rel=1e-5)
    assert saved[0][0] is scalar
