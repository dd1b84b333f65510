"""Supervised training: losses of judged steps, scores of a reward model, data, the table at the start, early ends."""

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from openppo.build import summary
from openppo.build.supervised_data import load_train_and_eval
from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig, from_options
from openppo.datasets import PreferenceExample, ProcessExample
from openppo.models.scalar_head import ProcessRewardModel, ScalarHeadModel
from openppo.tracking import Metrics, Trackers
from openppo.tracking.phase import current
from openppo.trainer.supervised.loop import SupervisedComponents, SupervisedTrainer
from openppo.trainer.supervised.trainers import ProcessRewardTrainer, RewardModelTrainer
from openppo.types import ModelInputs, SingleProcess
from tests.unit.trainer.conftest import OneOf, PlainModel, Record, StopIn, Strategy

MODEL = {"pretrain": "model", "dataset": "data"}
EOS, GOOD, BAD, NO = 1, 2, 3, -100  # a step ends with EOS
HARD = [
    ProcessExample([5, 6, 1, 7, 1, 8, 9, 1], [NO, NO, GOOD, NO, BAD, NO, NO, GOOD]),
    ProcessExample([10, 1], [NO, BAD]),
    ProcessExample([11, 12, 13, 14], [NO, NO, NO, NO]),  # nothing judged
    ProcessExample([4, 1, 15, 1, 16], [NO, GOOD, NO, GOOD, NO]),
    ProcessExample([17, 18, 1], [NO, NO, BAD]),
]
SOFT = [
    ProcessExample(
        row.token_ids, [NO if label == NO else 0.31 + 0.1 * t for t, label in enumerate(row.labels)]
    )
    for row in HARD
]


def parts_of(model, train, held_out=(), tokenizer=None, record=None, **strategy):
    record = record or Record()
    return SupervisedComponents(
        Strategy(**strategy), tokenizer, model, train, held_out, Trackers([record]), record
    )


@pytest.fixture
def judge_of(causal, make_tokenizer):
    """Makes a trainer of process reward models."""

    def make(examples, micro, rank=0, ranks=1):
        options = {
            "placeholder_token": "<eos>",
            "reward_tokens": ("<end>", "<sep>"),
            "micro_train_batch_size": micro,
        }
        config = from_options(TrainPRMConfig, **MODEL, **options, train_batch_size=len(examples))
        model, comm = PlainModel(ProcessRewardModel(causal)), OneOf(rank, ranks)
        return ProcessRewardTrainer(
            config, parts_of(model, examples, examples, make_tokenizer(), comm=comm)
        )

    return make


def judged_steps(model, examples):
    """Log-probs of (good, bad) and the probability of good that the label wants, of each step one by one."""
    steps = []
    for row in examples:
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
        for t, label in enumerate(row.labels):
            if label != NO:
                wanted = label if isinstance(label, float) else float(label == GOOD)
                steps.append((logits[t, [GOOD, BAD]].log_softmax(-1), wanted))
    assert len(steps) == 7
    return steps


def mean_loss(steps):
    return -sum(wanted * logp[0] + (1 - wanted) * logp[1] for logp, wanted in steps) / 7


@pytest.mark.parametrize("examples", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 1), (1, 2), (1, 9), (2, 1), (2, 2), (3, 1), (7, 4)]
)
def test_gradient_is_that_of_the_mean_over_judged_steps_for_any_split(
    causal, judge_of, examples, ranks, micro
):
    naive, total = mean_loss(judged_steps(causal, examples)), 0.0
    expected = torch.autograd.grad(naive, list(causal.parameters()))
    for rank in range(ranks):
        trainer = judge_of(examples, micro, rank, ranks)
        batch = trainer.make_batch(examples)
        total += sum(trainer.loss(part, batch.n_targets, Metrics()) for part in batch.micro_batches)
    assert total.item() == pytest.approx(naive.item(), abs=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(causal.parameters())), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("examples", [HARD, SOFT], ids=["hard", "soft"])
def test_loss_and_accuracy_count_every_judged_step_once(causal, judge_of, examples):
    trainer, steps = judge_of(examples, micro=2), judged_steps(causal, examples)
    right = [(logp[0] > logp[1]).item() == (wanted > 0.5) for logp, wanted in steps]
    assert 0 < sum(right) < len(steps)
    expected = {"eval_loss": mean_loss(steps).item(), "eval_accuracy": sum(right) / len(steps)}
    found = trainer.evaluate()
    assert found.pop("time/evaluation_s") > 0
    assert found == pytest.approx(expected, abs=1e-6)
    assert trainer.make_batch(examples).n_input_tokens == 8 + 2 + 4 + 5 + 3


PAIRS = [PreferenceExample([3 + i % 9] * (2 + i % 5), [9 - i % 7, 4]) for i in range(1025)]


@pytest.mark.parametrize(("n_train", "n_held_out", "used"), [(5, 0, 5), (5, 2, 2), (1025, 0, 513)])
def test_mean_and_std_are_of_held_out_or_spread_training_pairs(scalar, n_train, n_held_out, used):
    model, saved, tokenizer = (
        ScalarHeadModel(scalar, "reward"),
        [],
        SimpleNamespace(pad_token_id=0, eos_token_id=None),
    )
    data = PAIRS[:n_train], PAIRS[:n_held_out]
    parts = parts_of(
        PlainModel(model), *data, tokenizer, save_pretrained=lambda *args: saved.append(args)
    )
    parts.stop = StopIn(1)  # a checkpoint upon a signal has the model whole
    config = from_options(TrainRMConfig, **MODEL, train_batch_size=4, micro_train_batch_size=3)
    RewardModelTrainer(config, parts).save()

    pairs = PAIRS[:n_held_out] or PAIRS[: n_train : 2 if n_train > 1024 else 1]
    assert len(pairs) == used
    rows = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = torch.stack([model(ModelInputs.of_ids([ids], pad_token_id=0))[0] for ids in rows])
    assert scalar.config.mean == pytest.approx(scores.mean().item(), rel=1e-5)
    assert scalar.config.std == pytest.approx(scores.std().item(), rel=1e-5)
    assert saved[0][0] is scalar


class Failing(SupervisedTrainer):
    """Ends with ``ZeroDivisionError`` in its third step."""

    def loss(self, *_): ...

    def step(self, examples):
        self.global_step += 1
        return {"loss": 1 / (3 - self.global_step)}


def failing(record, **options):
    """A trainer without a model, and of ten steps."""
    model = SimpleNamespace(module=SimpleNamespace(model=None))
    parts = parts_of(
        model, [1] * 10, record=record, save_pretrained=lambda *_: record.saved.append("model")
    )
    return Failing(from_options(TrainSFTConfig, **MODEL, train_batch_size=1, **options), parts)


def test_a_failed_run_closes_its_trackers_and_raises():
    with pytest.raises(ZeroDivisionError):
        failing(record := Record(), logging_steps=1).fit()
    assert ([step for step, _ in record.logged], record.saved, record.closed) == ([1, 2], [], 1)


def test_a_condition_ends_the_run_with_its_model_saved_and_holds_when_it_resumes():
    options = {"stop_when": ("grad_norm > 9", "loss >= 1"), "logging_steps": 100}
    failing(record := Record(), **options).fit()  # losses 1/2, 1, then an error
    (step, state, _), model = record.saved
    assert (record.logged, step, model, record.closed) == ([(2, {"loss": 1.0})], 2, "model", 1)
    for given, raises in ((options, nullcontext()), ({}, pytest.raises(ZeroDivisionError))):
        again = failing(record := Record(), **given)
        record.load = lambda: state
        again.load_checkpoint()
        with raises:
            again.fit()
        assert (again.global_step, record.saved) == ((2, ["model"]) if given else (3, []))


def test_a_signal_lets_the_step_finish():
    """It arrives in the first step; the report of that step comes before the checkpoint."""
    trainer = failing(record := Record(), logging_steps=1)
    trainer.components.stop = StopIn(2)
    trainer.fit()
    [(step, state, was_closed)] = record.saved
    assert ([step for step, _ in record.logged], step, state["global_step"], was_closed) == (
        [1],
        1,
        1,
        False,
    )


def test_only_training_rows_are_mixed_and_each_row_is_progress(tmp_path, monkeypatch):
    for name, n in (("a", 40), ("b", 20)):
        rows = [{"text": f"{name}{i}"} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources, seen = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", []
    monkeypatch.setattr(current, "progress", lambda: seen.append(None))

    def texts(rows, show):
        return [row.row["text"] for row in show(rows)]

    data = {"dataset": sources, "dataset_probs": "3,1", "eval_dataset": sources}
    train, held_out = load_train_and_eval(
        from_options(TrainSFTConfig, **(MODEL | data)), SingleProcess(), texts
    )
    assert held_out == [f"a{i}" for i in range(40)] + [f"b{i}" for i in range(20)]
    assert len(train) < 60 and train[:40] != held_out[:40]
    assert len(seen) == len(train) + 60, "the watchdog ends a rank without progress"


TINY = {"train_batch_size": 4, "micro_train_batch_size": 2, "max_epochs": 2}


def test_the_table_counts_small_last_steps_max_steps_and_ranks(caplog, monkeypatch):
    monkeypatch.setattr(summary, "model_role", lambda *_, **__: [("model", "m")])
    caplog.set_level(logging.INFO, logger="openppo")
    split = "4 samples, in 2 micro-batches of up to 2"
    for options, n, done, ranks, said in (
        ({}, 10, 0, 1, (split, "2 epochs of 10 samples, 6 steps")),
        (
            {"max_steps": 5},
            10,
            3,
            1,
            ("2 epochs of 10 samples, 6 steps; --max_steps ends it after 5", "step 3 of 5"),
        ),
        (
            {},
            3,
            0,
            2,
            (
                "3 samples, in 1 micro-batch of up to 2 on each of 2 ranks",
                "2 epochs of 3 samples, 2 steps",
            ),
        ),
    ):
        caplog.clear()
        parts = parts_of(SimpleNamespace(module=None), [1] * n, is_main=True, comm=OneOf(0, ranks))
        trainer = Failing(from_options(TrainSFTConfig, **MODEL, **TINY, **options), parts)
        trainer.global_step = done
        summary.log_supervised_start(trainer)
        lines = [line.rstrip() for line in caplog.text.splitlines()]
        assert all(any(line.endswith(each) for line in lines) for each in said), lines
        assert ("resumes" in caplog.text) is (done > 0)
