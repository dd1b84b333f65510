"""A critic that is trained while experience is made ends where one that is asked for values first does."""

import copy

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.replay_buffer import mini_batches
from openppo.models import ScalarHeadModel
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.trainer.critic_step import CriticStep, OnePassCritic
from openppo.types import FinishReason, Prompt, SingleProcess, Trajectory
from tests.ranks import on_ranks
from tests.unit.trainer.conftest import CPU, PPO, PlainModel

BASE = {**PPO, "micro_train_batch_size": 3, "train_batch_size": 8}


def trajectory(i):
    ids = [(3 * i + t) % 20 for t in range(4 + i % 4)]
    mask = [t >= 2 and (t + i) % 4 != 0 for t in range(len(ids))]
    log_probs, versions = [-1.0 * m for m in mask], [m - 1 for m in mask]
    prompt, scores = Prompt("", ids[:2]), {"a": float(i % 3)}
    return Trajectory(ids, mask, log_probs, versions, FinishReason.STOP, prompt, i, scores=scores)


def trajectories(n):
    return [trajectory(i) for i in range(n)]


def maker_of(one_pass, config, scalar, comm):
    """A maker without an actor, the step of its critic, and the critic."""
    model = PlainModel(ScalarHeadModel(copy.deepcopy(scalar), "critic"), rate=0.1)
    step = CriticStep(model, config, comm, CPU)
    arguments = (lambda *_, **__: None, model, None, config, comm, CPU, 0)
    return OnePassCritic(step, *arguments) if one_pass else ExperienceMaker(*arguments), step, model


def outcome(one_pass, scalar, n, **options):
    """Experience, metrics, weights and forwards of the critic, after a global step without an actor."""
    config, comm = from_options(TrainPPOConfig, **BASE, **options), SingleProcess()
    maker, step, model = maker_of(one_pass, config, scalar, comm)
    buffer, metrics = ReplayBuffer(normalize=True), Metrics()
    buffer.fill(maker.make(Rollout(trajectories(n), Metrics()), metrics))
    for batch in mini_batches(buffer, config, 0):
        step.train(batch, metrics, True)
    fields = [item.tensors() for item in buffer.items]
    return fields, metrics.reduced(comm), list(model.module.parameters()), model.n_forwards


@pytest.mark.parametrize("options", [{}, {"max_epochs": 2}, {"value_pretrain_steps": 1}], ids=str)
def test_values_advantages_weights_and_metrics_are_those_of_two_passes(options, scalar):
    plain, plain_metrics, plain_weights, n_plain = outcome(False, scalar, 8, **options)
    fields, metrics, weights, n_forwards = outcome(True, scalar, 8, **options)
    assert n_forwards < n_plain, "the forward that experience asks for is left out"
    torch.testing.assert_close(fields, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(plain_metrics, abs=1e-6)


def test_a_rollout_of_several_optimizer_steps_is_made_as_usual(scalar):
    plain, plain_metrics, _, n_plain = outcome(False, scalar, 9)
    fields, metrics, _, n_forwards = outcome(True, scalar, 9)
    assert (n_forwards, metrics) == (n_plain, plain_metrics)
    assert all(torch.equal(a["values"], b["values"]) for a, b in zip(fields, plain, strict=True))


@pytest.mark.parametrize(
    "options", [{"buffer_limit": 8}, {"overlong_filter": True}, {"lora_rank": 2, "lora_dropout": 0.1}]
)
def test_it_is_not_chosen_where_the_training_forward_would_differ(options):
    assert OnePassCritic.is_exact(from_options(TrainPPOConfig, **BASE))
    assert not OnePassCritic.is_exact(from_options(TrainPPOConfig, **BASE, **options))


def test_ranks_share_the_step_and_get_back_their_own_values(scalar):
    rows, config = trajectories(7), from_options(TrainPPOConfig, **BASE)

    def work(comm):
        maker, *_ = maker_of(True, config, scalar, comm)
        mine = Rollout(rows[:2] if comm.rank == 0 else rows[2:], Metrics())
        return [item.values for item in maker.make(mine, Metrics())]

    values = [value for of_rank in on_ranks(2, work) for value in of_rank]
    critic = ScalarHeadModel(scalar, "critic")
    for row, found in zip(rows, values, strict=True):
        expected = critic(torch.tensor([row.token_ids]), torch.ones(1, len(row.token_ids)).bool())
        masked = torch.where(torch.tensor([row.action_mask]), expected, 0.0)
        torch.testing.assert_close(found, masked, rtol=0, atol=1e-6, check_dtype=False)
