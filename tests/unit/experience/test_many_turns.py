"""An episode of several turns from scoring to the loss, by hand: nothing but the action mask says what is an action."""

import math
from typing import Any

import pytest
import torch

from openppo.experience import ReplayBuffer
from openppo.experience.measure import measure_staleness
from openppo.experience.replay_buffer import collate
from openppo.models.loss import PolicyLoss, token_weights
from openppo.rollout.rollout import write_scores
from openppo.tracking import Metrics
from openppo.types import FinishReason, Prompt, Score, SingleProcess, Trajectory


def episode(weight=1.0):
    """Prompt 3 4, action 5 6, three tokens of the environment, action 10 1."""
    actions = [False, False, True, True, False, False, False, True, True]
    log_probs, versions = [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0], [-1, -1, 4, 4, -1, -1, -1, 5, 6]
    lists = [3, 4, 5, 6, 7, 8, 9, 10, 1], actions, log_probs, versions
    return Trajectory(*lists, FinishReason.STOP, Prompt("ab", [3, 4]), group=0, weight=weight)


def single():
    """Prompt 3, action 5 1."""
    lists: Any = ([3, 5, 1], [False, True, True], [0.0, -1.0, -1.5], [-1, 6, 6])
    return Trajectory(*lists, FinishReason.STOP, Prompt("a", [3]), group=1)


def test_spans_and_rewards_are_those_of_action_tokens():
    sample = episode()
    assert (sample.spans, sample.action_ids) == ([(2, 4), (7, 9)], [5, 6, 10, 1])
    write_scores([sample], [Score({"game": 2.0}, token_rewards=[9.0, 0, 0, 0.5, 9.0, 0, 0, 0.25, 0])])
    assert sample.token_rewards == [0, 0, 0, 0.5, 0, 0, 0, 0.25, 0]
    assert (sample.total_reward({}), sample.step_rewards) == (2.75, [0, 0.5, 0.25, 0])
    with pytest.raises(ValueError, match="zip"):
        write_scores([sample], [Score(token_rewards=[1.0] * 4)])


def weighted_loss(batch, loss_agg, n_tokens, n_sequences):
    """Loss, and its gradient by log-probs."""
    old = batch.rollout_log_probs
    log_probs = (old + 0.1).requires_grad_()
    per_token = PolicyLoss(reduction="none")(log_probs, old, torch.ones_like(old), batch.action_mask)
    weights = token_weights(batch.action_mask, loss_agg, n_tokens, n_sequences, 5, batch.weight)
    loss = (per_token * weights).sum()
    return loss.item(), *torch.autograd.grad(loss, log_probs)


@pytest.mark.parametrize(
    ("loss_agg", "expected", "share", "of_half"),
    [  # 4 tokens of weight 0.5, 2 of weight 1
        ("token_mean", (0.5 * 4 + 2) / (0.5 * 4 + 2), 1 / 4, 1 / 8),
        ("sequence_mean", (0.5 + 1) / (0.5 + 1), 1 / 1.5 / 2, 1 / 1.5 / 8),
        ("constant", (0.5 * 4 + 2) / ((0.5 + 1) * 5), 1 / 7.5, 1 / 15),
    ],
)
def test_weights_enter_the_loss_as_by_hand_however_it_is_split(loss_agg, expected, share, of_half):
    batch, r = collate([episode(weight=0.5), single()], pad_token_id=0), math.exp(0.1)
    loss, gradient = weighted_loss(batch, loss_agg, n_tokens=4.0, n_sequences=1.5)
    assert loss == pytest.approx(-r * expected, rel=1e-6)  # loss of each token: -r, as advantages are 1
    assert (gradient[1, 1].item(), gradient[0, 2].item()) == pytest.approx((-r * share, -r * of_half), rel=1e-6)
    rows = [episode(weight=0.25), single(), episode(weight=0.75), episode(), episode(weight=0.0)]
    buffer = ReplayBuffer()
    buffer.append(collate(rows, pad_token_id=0))
    for micro in (1, 2, 5):
        [step] = buffer.mini_batches(5, micro, epochs=1, seed=0)
        counts = step.n_tokens, step.n_sequences
        assert counts == (0.25 * 4 + 2 + 0.75 * 4 + 4, 3.0)
        parts = [weighted_loss(part, loss_agg, *counts)[0] for part in step.micro_batches]
        assert sum(parts) == pytest.approx(weighted_loss(collate(rows, 0), loss_agg, *counts)[0], rel=1e-6)


def test_staleness_is_in_versions_of_action_tokens():
    metrics = Metrics()
    measure_staleness([episode(), single()], 6, metrics)
    assert metrics.reduced(SingleProcess()) == {"staleness": pytest.approx(5 / 6), "staleness_max": 2.0}
