"""A run without rewards: its gradient is that of the reverse KL to the teacher, on a policy that is a table."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.replay_buffer import mini_batches
from openppo.tracking import Metrics
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.evaluation.held_out_kl import measure_held_out_kl
from openppo.types import SingleProcess
from tests.learning.tabular import CPU, PAD, Policy

VOCAB = 3
LENGTH = 3
START = VOCAB
"""The only token of the prompt."""
DISTIL: dict[str, Any] = {
    "pretrain": "m",
    "prompt_data": "d",
    "reward_fn": "none",
    "ref_pretrain": "t",
    "init_kl_coef": 1.0,
    "advantage_estimator": "reinforce",
    "normalize_advantages": "off",
    "old_log_probs": "recompute",
    "rollout_batch_size": 1,
    "train_batch_size": 1,
}
K2_IN_THE_LOSS = {"use_kl_loss": True, "kl_estimator": "k2"}


class Gradients:
    """A ``TrainableModel`` that never steps, so that gradients add up."""

    learning_rate = 0.0

    def __init__(self, module: Policy) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> float:
        return 0.0


def table(seed: int) -> Policy:
    """Random logits of the next token by the token before."""
    policy = Policy(VOCAB + 1, VOCAB)
    torch.manual_seed(seed)
    torch.nn.init.normal_(policy.logits)
    return policy


STUDENT, TEACHER = table(1), table(2)


def make(samples, **options):
    """The maker's experiences of a run without rewards, its config and its metrics."""
    config = from_options(TrainPPOConfig, **DISTIL | options)
    maker = ExperienceMaker(STUDENT, None, TEACHER, config, SingleProcess(), CPU, PAD)
    metrics = Metrics()
    return maker.make(samples, metrics), config, metrics.reduced(SingleProcess())


def gradient(samples, **options) -> Tensor:
    """Gradient of one optimizer step on ``samples``, as a run takes it."""
    experience, config, _ = make(samples, train_batch_size=len(samples), **options)
    buffer = ReplayBuffer(SingleProcess(), normalizes=False)
    buffer.fill(experience)
    (batch,) = mini_batches(buffer, config, 0)
    model: Any = Gradients(STUDENT)
    STUDENT.logits.grad = None
    ActorStep(model, config, SingleProcess(), CPU).train(
        batch, None, Metrics(), kl_coef=1.0, on_policy=True
    )
    assert STUDENT.logits.grad is not None
    return STUDENT.logits.grad.clone()


def by_autograd(loss: Tensor) -> Tensor:
    (exact,) = torch.autograd.grad(loss, STUDENT.logits)
    return exact


@pytest.mark.parametrize("options", [{"gamma": 0.0}, K2_IN_THE_LOSS])
def test_the_gradient_is_the_score_function_of_each_tokens_reverse_kl(make_sample, options):
    samples = [make_sample([START], [0, 2]), make_sample([START], [1, 1, 0], [1, 0, 1])]
    log_p = STUDENT.logits.log_softmax(-1)
    log_q = TEACHER.logits.log_softmax(-1)
    loss, n_tokens = torch.zeros(()), 0
    for sample in samples:
        segment = sample.last
        for t, token in enumerate(segment.token_ids):
            if segment.action_mask[t]:
                state = segment.token_ids[t - 1]
                kl = (log_p[state, token] - log_q[state, token]).detach()
                loss = loss + kl * log_p[state, token]
                n_tokens += 1

    torch.testing.assert_close(gradient(samples, **options), by_autograd(loss / n_tokens))


def kl_of_sequences() -> Tensor:
    """KL(student || teacher) of whole responses, over all of them."""
    log_p, log_q = (model.logits.log_softmax(-1) for model in (STUDENT, TEACHER))
    total = torch.zeros(())
    for tokens in product(range(VOCAB), repeat=LENGTH):
        states = [START, *tokens[:-1]]
        log_prob = log_p[states, tokens].sum()
        total = total + log_prob.exp() * (log_prob - log_q[states, tokens].sum())
    return total


def kl_of_next_tokens() -> Tensor:
    """Sum over places of KL(student || teacher) of the next token, the tokens before sampled as they are."""
    log_p, log_q = (model.logits.log_softmax(-1) for model in (STUDENT, TEACHER))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # (S,)
    total = torch.zeros(())
    for n in range(LENGTH):
        for before in product(range(VOCAB), repeat=n):
            states = [START, *before]
            chance = log_p[states[:-1], before].sum().exp().detach()
            total = total + chance * kl[states[-1]]
    return total


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"gamma": 1.0}, kl_of_sequences),
        ({"gamma": 0.0}, kl_of_next_tokens),
        (K2_IN_THE_LOSS, kl_of_next_tokens),
    ],
)
def test_its_expectation_is_the_exact_gradient_of_the_reverse_kl(make_sample, options, exact):
    log_p = STUDENT.logits.detach().log_softmax(-1)
    expected = torch.zeros_like(log_p)
    for tokens in product(range(VOCAB), repeat=LENGTH):
        chance = log_p[[START, *tokens[:-1]], tokens].sum().exp()
        mean = gradient([make_sample([START], list(tokens))], **options)  # over the tokens
        expected += chance * LENGTH * mean
    torch.testing.assert_close(expected, by_autograd(exact()), rtol=1e-4, atol=1e-5)


def test_nothing_is_called_a_reward_where_there_is_none(make_sample):
    _, _, metrics = make([make_sample([START], [0, 2]), make_sample([START], [1])])
    assert [name for name in metrics if "reward" in name] == []
    assert "kl" in metrics
    assert "groups_without_signal" not in metrics


def test_a_source_that_rewards_its_samples_is_refused(make_sample):
    with pytest.raises(ValueError, match=r"--reward_fn none.*right.*leave the flag out"):
        make([make_sample([START], [0], right=1.0)])


def test_the_held_out_kl_is_the_mean_log_ratio_of_action_tokens(make_sample):
    samples = [make_sample([START], [0, 2]), make_sample([START], [1])]
    config = from_options(TrainPPOConfig, **DISTIL)
    maker = ExperienceMaker(STUDENT, None, TEACHER, config, SingleProcess(), CPU, PAD)
    metrics = Metrics()
    measure_held_out_kl(maker, samples, metrics)

    log_ratio = (STUDENT.logits.log_softmax(-1) - TEACHER.logits.log_softmax(-1)).detach()
    places = [(START, 0), (0, 2), (START, 1)]
    mean = sum(float(log_ratio[place]) for place in places) / 3
    assert metrics.reduced(SingleProcess()) == {"eval_kl": pytest.approx(mean, abs=1e-6)}
