"""Losses of SFT, reward models and process reward models, against Hugging Face and numbers worked out by hand."""

import math

import pytest
import torch

from openppo.models.loss import GPTLMLoss, LogExpLoss, PairWiseLoss, PRMLoss

PLACEHOLDER, GOOD, BAD, VOCAB = 9, 4, 2, 10


def zero_with_zero_gradient(loss, logits):
    return loss.item() == 0.0 and not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_language_model_loss_equals_that_of_hugging_face(llama, dtype):
    model = llama().to(dtype)
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = labels[2, 5:] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    assert GPTLMLoss()(output.logits, labels).item() == pytest.approx(
        output.loss.float().item(), rel=1e-6
    )


@pytest.mark.parametrize("labels", [torch.full((2, 3), -100), torch.zeros(2, 1, dtype=torch.int64)])
def test_without_a_label_to_predict_loss_and_gradient_are_zero(labels):
    logits = torch.randn(*labels.shape, 5, requires_grad=True)
    assert zero_with_zero_gradient(GPTLMLoss()(logits, labels), logits)


def test_what_does_not_count_is_named_by_the_loss():
    assert GPTLMLoss.IGNORE_INDEX == PRMLoss(PLACEHOLDER).IGNORE_INDEX == -100
    logits, labels = torch.randn(1, 4, 5), torch.tensor([[1, 2, 3, 4]])
    loss = GPTLMLoss()
    loss.IGNORE_INDEX = 3
    assert torch.equal(loss(logits, labels), GPTLMLoss()(logits, torch.tensor([[1, 2, -100, 4]])))


def test_pairwise_losses_by_hand():
    chosen, rejected, margin = torch.tensor(
        [[2.0, 0.5, -1.0], [1.0, 0.5, 1.0], [0.5, 3.0, 0.0]], dtype=torch.float64
    )
    plain, with_margin = (
        sum(math.log1p(math.exp(-d)) for d in leads) / 3 for leads in ([1, 0, -2], [0.5, -3, -2])
    )
    assert PairWiseLoss()(chosen, rejected).item() == pytest.approx(plain, abs=1e-9)
    assert LogExpLoss()(chosen, rejected).item() == pytest.approx(plain, abs=1e-9)
    for loss in (PairWiseLoss(), LogExpLoss()):
        assert loss(chosen, rejected, margin).item() == pytest.approx(with_margin, abs=1e-9)

    for loss in (PairWiseLoss(), LogExpLoss()):
        for lead, expected, slope in (
            (1000.0, 0.0, 0.0),
            (-1000.0, 1000.0, -1.0),
        ):  # huge differences are stable
            pair = torch.tensor([[lead], [0.0]], requires_grad=True)
            found = loss(*pair)
            assert found.item() == expected
            assert torch.autograd.grad(found, pair)[0].tolist() == [[slope], [-slope]]


INPUTS = torch.tensor([[1, PLACEHOLDER, 3, PLACEHOLDER], [PLACEHOLDER, 5, 6, 7]])
STEPS = [(0, 1), (0, 3), (1, 0)]  # places of the placeholders


def step_logits():
    return torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def labels_at_steps(*labels, elsewhere=-100):
    soft = any(isinstance(label, float) for label in labels)
    filled = torch.full((2, 4), elsewhere, dtype=torch.float32 if soft else torch.int64)
    for place, label in zip(STEPS, labels, strict=True):
        filled[place] = label
    return filled


def log_share(logits, place, token, rivals=(GOOD, BAD)):
    powers = {rival: math.exp(logits[place][rival].item()) for rival in rivals}
    return math.log(powers[token] / sum(powers.values()))


@pytest.mark.parametrize(
    ("labels", "reward_tokens"),
    [
        ((GOOD, BAD, BAD), [GOOD, BAD]),  # compete among the reward tokens
        ((GOOD, BAD, 7), None),  # in the whole vocabulary
        ((0.9, 0.25, 0.0), [GOOD, BAD]),  # the probability of the first reward token
        ((GOOD, -100, BAD), [GOOD, BAD]),  # an ignored step does not count
        ((1.0, -100.0, 0.0), [GOOD, BAD]),
    ],
)
def test_the_process_reward_loss_equals_a_loop_over_steps(labels, reward_tokens):
    logits, losses = step_logits(), []
    for place, label in zip(STEPS, labels, strict=True):
        if isinstance(label, float) and label >= 0:
            shares = log_share(logits, place, GOOD), log_share(logits, place, BAD)
            losses.append(-label * shares[0] - (1 - label) * shares[1])
        elif label >= 0:
            losses.append(-log_share(logits, place, label, reward_tokens or range(VOCAB)))
    loss = PRMLoss(PLACEHOLDER, reward_tokens)
    for elsewhere in (-100, 8):  # labels at other tokens than placeholders are never read
        found = loss(INPUTS, logits, labels_at_steps(*labels, elsewhere=elsewhere))
        assert found.item() == pytest.approx(sum(losses) / len(losses), abs=1e-6)


@pytest.mark.parametrize("labels", [(GOOD, GOOD, BAD), (0.9, 0.6, 0.2)])
def test_accuracy_is_the_share_of_steps_whose_likelier_reward_token_is_the_label(labels):
    logits = torch.zeros(2, 4, VOCAB)
    logits[..., 7] = 50.0  # the likeliest token of all, but no reward token
    logits[0, 1, GOOD], logits[0, 3, BAD], logits[1, 0, BAD] = 1.0, 1.0, 1.0
    _, accuracy = PRMLoss(PLACEHOLDER, [GOOD, BAD])(
        INPUTS, logits, labels_at_steps(*labels), return_acc=True
    )
    assert accuracy.item() == pytest.approx(2 / 3)
    loss, accuracy = PRMLoss(8, [GOOD, BAD])(
        INPUTS, logits.requires_grad_(), labels_at_steps(*labels), return_acc=True
    )
    assert zero_with_zero_gradient(loss, logits), "without any step"
    assert accuracy.item() == 0.0


def test_labels_that_do_not_fit_the_reward_tokens_are_refused():
    with pytest.raises(
        ValueError, match=r"labels \[7\] at placeholder positions are not among .*\[4, 2\]"
    ):
        PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, step_logits(), labels_at_steps(GOOD, 7, BAD))
    for reward_tokens in (None, [GOOD], [GOOD, BAD, 5]):
        with pytest.raises(ValueError, match="exactly two reward_token_ids"):
            PRMLoss(PLACEHOLDER, reward_tokens)(
                INPUTS, step_logits(), labels_at_steps(0.5, 0.5, 0.5)
            )
