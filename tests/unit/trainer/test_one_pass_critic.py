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

CPU = torch.device("cpu")
BASE = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "micro_train_batch_size": 3, "train_batch_size": 8}


class Sgd:
    """A ``TrainableModel`` with plain gradient descent."""

    learning_rate = 0.1

    def __init__(self, module):
        self.module, self.train, self.n_forwards = module, module.train, 0

    def __call__(self, *inputs):
        self.n_forwards += 1
        return self.module(*inputs)

    def backward(self, loss, last):
        loss.backward()

    @torch.no_grad()
    def step(self):
        trained = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.cat([p.grad.flatten() for p in trained]).norm().item()
        for p in trained:
            p -= self.learning_rate * p.grad
        self.module.zero_grad(set_to_none=True)
        return norm


def trajectory(i):
    ids = [(3 * i + t) % 20 for t in range(4 + i % 4)]
    mask = [t >= 2 and (t + i) % 4 != 0 for t in range(len(ids))]
    log_probs, versions = [-1.0 * m for m in mask], [m - 1 for m in mask]
    prompt, scores = Prompt("", ids[:2]), {"a": float(i % 3)}
    return Trajectory(ids, mask, log_probs, versions, FinishReason.STOP, prompt, i, scores=scores)


def trajectories(n):
    return [trajectory(i) for i in range(n)]


def outcome(one_pass, scalar, n, **options):
    """Experience, metrics, weights and forwards of the critic, after a global step without an actor."""
    config = from_options(TrainPPOConfig, **(BASE | options))
    model = Sgd(ScalarHeadModel(copy.deepcopy(scalar), "critic"))
    step = CriticStep(model, config, SingleProcess(), CPU)
    arguments = (lambda *_, **__: None, model, None, config, SingleProcess(), CPU, 0)
    maker = OnePassCritic(step, *arguments) if one_pass else ExperienceMaker(*arguments)
    buffer, metrics = ReplayBuffer(normalize=True), Metrics()
    buffer.fill(maker.make(Rollout(trajectories(n), Metrics()), metrics))
    for batch in mini_batches(buffer, config, 0):
        step.train(batch, metrics, True)
    fields = [item.tensors() for item in buffer.items]
    return fields, metrics.reduced(SingleProcess()), list(model.module.parameters()), model.n_forwards


@pytest.mark.parametrize("options", [{}, {"max_epochs": 2}, {"value_pretrain_steps": 1}], ids=str)
def test_values_advantages_weights_and_metrics_are_those_of_two_passes(options, scalar):
    plain, plain_metrics, plain_weights, n_plain = outcome(False, scalar, 8, **options)
    fields, metrics, weights, n_forwards = outcome(True, scalar, 8, **options)
    assert n_forwards < n_plain, "the forward that experience asks for is left out"
    for ours, theirs in zip(fields, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
    for ours, theirs in zip(weights, plain_weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
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
    assert not OnePassCritic.is_exact(from_options(TrainPPOConfig, **(BASE | options)))


def test_ranks_share_the_step_and_get_back_their_own_values(scalar, on_ranks):
    rows, config = trajectories(7), from_options(TrainPPOConfig, **BASE)
    models = [Sgd(ScalarHeadModel(copy.deepcopy(scalar), "critic")) for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        arguments = (lambda *_, **__: None, model, None, config, comm, CPU, 0)
        maker = OnePassCritic(CriticStep(model, config, comm, CPU), *arguments)
        mine = Rollout(rows[:2] if comm.rank == 0 else rows[2:], Metrics())
        return [item.values for item in maker.make(mine, Metrics())]

    values = [value for of_rank in on_ranks(2, work) for value in of_rank]
    critic = ScalarHeadModel(scalar, "critic")
    for row, found in zip(rows, values, strict=True):
        expected = critic(torch.tensor([row.token_ids]), torch.ones(1, len(row.token_ids)).bool())
        masked = torch.where(torch.tensor([row.action_mask]), expected, 0.0)
        torch.testing.assert_close(found, masked, rtol=0, atol=1e-6, check_dtype=False)
