"""Calls in the order of OpenRLHF 0.6.1, and of later versions: what would run and mean something else is an error."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.experience import (
    ReplayBuffer,
    compute_reward,
    get_advantages_and_returns,
    get_cumulative_returns,
)
from openppo.models import Actor, PolicyLoss, ValueLoss, compute_approx_kl
from openppo.models.scalar_head import ScalarHeadModel
from openppo.types import Experience, ModelInputs

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
SCORES, KL = torch.tensor([1.0, 2.0]), torch.randn(2, 6)
IDS, MASK = torch.randint(5, 30, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
ACTIONS = torch.tensor(
    [[False, False, False, True, True, False], [False, False, False, True, True, True]]
)
N_ACTIONS = torch.tensor([2, 3])


def name(value):
    """Name of a case: its message."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SCORES, 0.1, KL, ACTIONS), "kl is 0.1, no tensor"),
        ((SCORES, 1, KL, ACTIONS, 3, (-10.0, 10.0)), "kl is 1, no tensor"),
        (
            (SCORES, torch.tensor(0.1), KL, ACTIONS),
            r"kl has the shape \(\) in place of 2 dimensions",
        ),
        (
            (SCORES, torch.tensor([0.1]), KL, ACTIONS),
            r"kl has the shape \(1,\) in place of 2 dimensions",
        ),
        ((SCORES, 0.1, [KL[0], KL[1]], None, [2, 3]), "kl is 0.1, no tensor"),
        ((SCORES, None, KL, ACTIONS), r"kl_coef has the shape \(2, 6\), and is one number"),
        ((SCORES, KL, 0.1, ACTIONS), "action_mask is 0.1, no tensor"),
        ((1.0, KL, ACTIONS, 0.1), "scores is 1.0, no tensor"),
        (
            (SCORES[:, None], KL, ACTIONS, 0.1),
            r"scores has the shape \(2, 1\) in place of 1 dimensions",
        ),
    ],
    ids=name,
)
def test_rewards_in_another_order_are_an_error(arguments, message):
    order = r": OpenPPO's order is compute_reward\(scores, kl, action_mask, kl_coef, reward_clip_range\)\.$"
    with pytest.raises(TypeError, match=f"^{message}{order}"):
        compute_reward(*arguments)


@pytest.mark.parametrize("coefficient", [0, 0.1, torch.tensor(0.1)])
def test_a_coefficient_may_be_any_one_number(coefficient):
    rewards = compute_reward(SCORES, KL, ACTIONS, coefficient)
    assert torch.equal(rewards, compute_reward(SCORES, KL, ACTIONS, float(coefficient)))
    assert rewards[0, 4] == pytest.approx(1.0 - float(coefficient) * float(KL[0, 4]))


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_values_of_another_order_are_an_error(role):
    model = ScalarHeadModel(
        LlamaForSequenceClassification(LlamaConfig(num_labels=1, **SIZES)), role
    )
    with pytest.raises(TypeError, match="^the first argument is a Tensor, no ModelInputs"):
        model(IDS)
    with pytest.raises(TypeError, match="positional arguments"):
        model(IDS, N_ACTIONS, MASK)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (3, "attention_mask is 3, no tensor"),
        ([2, 3], r"attention_mask is \[2, 3\], no tensor"),
        (None, "attention_mask is None, no tensor"),
        (N_ACTIONS, r"attention_mask has the shape \(2,\), and sequences \(2, 6\)"),
        (ACTIONS[:, 1:], r"attention_mask has the shape \(2, 5\), and sequences \(2, 6\)"),
        (MASK.float(), "sequences and attention_mask are torch.int64 and torch.float32"),
    ],
    ids=name,
)
def test_inputs_without_a_mask_of_their_shape_are_an_error(mask, message):
    order = r"ModelInputs\(sequences, attention_mask\), int64 and bool, both \(B, L\)"
    with pytest.raises(TypeError, match=rf"^{message}: the order is {order}\.$"):
        ModelInputs(IDS, mask)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS, MASK), "the first argument is a Tensor, no ModelInputs"),
        ((IDS, N_ACTIONS, MASK), "the first argument is a Tensor, no ModelInputs"),
        (
            (ModelInputs(IDS, MASK), ACTIONS[:, 3:]),
            r"action_mask has the shape \(2, 3\), and sequences \(2, 6\)",
        ),
        ((ModelInputs(IDS, MASK), 3), "action_mask is 3, no tensor"),
    ],
    ids=name,
)
def test_log_probs_of_another_order_are_an_error(arguments, message):
    actor = Actor(LlamaForCausalLM(LlamaConfig(**SIZES)))
    order = r"\(inputs, action_mask\), with inputs of ModelInputs"
    with pytest.raises(TypeError, match=rf"^{message}: OpenPPO's order is {order}"):
        actor(*arguments)


def test_options_of_an_actor_have_names():
    """OpenRLHF's order is flash attention, bf16, 4 bits, LoRA's rank: here that was bf16 first."""
    with pytest.raises(TypeError, match="takes 2 positional arguments but 6 were given"):
        Actor(LlamaForCausalLM(LlamaConfig(**SIZES)), False, True, False, 8)


def test_old_fields_batch_sizes_and_estimators_are_errors():
    with pytest.raises(
        TypeError,
        match="^inputs is a Tensor, no ModelInputs. The order is inputs, action_mask, rollout_",
    ):
        Experience(IDS, KL, KL, KL, KL, KL, MASK, ACTIONS, {}, KL)
    with pytest.raises(
        TypeError,
        match="^comm is 8, no process group: give batch sizes to ReplayBuffer.mini_batches",
    ):
        ReplayBuffer(8, 0, True)
    with pytest.raises(
        TypeError,
        match=r"^action_mask is 'k3', no tensor: OpenPPO's order is \(log_probs, ref_log_",
    ):
        compute_approx_kl(KL, KL, "k3")


def test_the_other_names_have_the_order_of_openrlhf():
    """By hand for one row of two actions, in the positional order of OpenRLHF 0.6.1."""
    mask, values = torch.tensor([[False, True, True]]), torch.tensor([[0.0, 0.5, 0.25]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = get_advantages_and_returns(values, rewards, mask, 0.5, 0.5)
    assert torch.allclose(advantages, torch.tensor([[0.0, -0.375 + 0.25 * 0.75, 0.75]]))
    assert torch.allclose(returns, advantages + values)
    assert torch.allclose(
        get_cumulative_returns(rewards, mask, 0.5), torch.tensor([[0.0, 0.5, 1.0]])
    )
    old, new = torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 0.0]])
    loss = PolicyLoss(0.2)(new, old, torch.tensor([[0.0, 2.0, 4.0]]), mask)
    assert loss.item() == pytest.approx(-(1.2 * 2.0 + 4.0) / 2)
    assert ValueLoss(0.1)(new, old, new, mask).item() == pytest.approx(0.5 * 0.9**2 / 2)
