"""Losses of SFT, reward models and process reward models, against Hugging Face and numbers worked out by hand."""

import math

import pytest
import torch

from openppo.models.loss import GPTLMLoss, LogExpLoss, PairWiseLoss, PRMLoss

PLACEHOLDER, GOOD, BAD, VOCAB = 9, 4, 2, 10


def softmax(logits):
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_language_model_loss_equals_that_of_hugging_face(llama, dtype):
    model = llama().to(dtype)
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = -100
    labels[2, 5:] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    assert GPTLMLoss()(output.logits, labels).item() == pytest.approx(output.loss.float().item(), rel=1e-6)


def test_logits_at_t_are_scored_against_the_label_at_t_plus_one():
    logits = torch.zeros(1, 3, 2)
    logits[0, 0] = torch.tensor([0.0, math.log(3.0)])  # 3/4 for token 1
    logits[0, 1] = torch.tensor([math.log(7.0), 0.0])  # 7/8 for token 0
    loss = GPTLMLoss()(logits, torch.tensor([[0, 1, 0]]))
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.875)) / 2, abs=1e-6)


def test_ignored_labels_do_not_count_in_the_mean():
    logits = torch.zeros(1, 4, 5)
    logits[0, 2] = torch.tensor([100.0, 0.0, 0.0, 0.0, 0.0])  # at an ignored label
    loss = GPTLMLoss()(logits, torch.tensor([[-100, 1, 2, -100]]))
    assert loss.item() == pytest.approx(math.log(5), abs=1e-6)


def test_with_all_labels_ignored_loss_and_gradient_are_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = GPTLMLoss()(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert bool((logits.grad == 0).all())


def test_a_sequence_of_one_token_has_nothing_to_predict():
    assert GPTLMLoss()(torch.randn(2, 1, 5), torch.zeros(2, 1, dtype=torch.int64)).item() == 0.0


def test_the_pairwise_loss_equals_minus_log_sigmoid_of_the_difference():
    chosen, rejected = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([1.0, 0.5, 1.0])
    expected = [math.log(1 + math.exp(-d)) for d in (1.0, 0.0, -2.0)]
    assert PairWiseLoss()(chosen, rejected).item() == pytest.approx(sum(expected) / 3, abs=1e-6)


def test_the_margin_is_what_the_chosen_must_lead_by():
    chosen, rejected, margin = torch.tensor([2.0, 0.5]), torch.tensor([1.0, 0.5]), torch.tensor([0.5, 3.0])
    expected = [math.log(1 + math.exp(-d)) for d in (0.5, -3.0)]
    assert PairWiseLoss()(chosen, rejected, margin).item() == pytest.approx(sum(expected) / 2, abs=1e-6)


@pytest.mark.parametrize("loss", [PairWiseLoss(), LogExpLoss()])
def test_huge_differences_are_stable_in_value_and_gradient(loss):
    for lead, expected, slope in ((1000.0, 0.0, 0.0), (-1000.0, 1000.0, -1.0)):
        chosen, rejected = torch.tensor([lead], requires_grad=True), torch.tensor([0.0], requires_grad=True)
        found = loss(chosen, rejected)
        found.backward()
        assert found.item() == expected
        assert (chosen.grad, rejected.grad) == (torch.tensor([slope]), torch.tensor([-slope]))


def test_the_log_exp_loss_equals_the_pairwise_loss_without_margin():
    chosen, rejected = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 10
    expected = sum(math.log1p(math.exp(r - c)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)) / 50
    assert LogExpLoss()(chosen, rejected).item() == pytest.approx(expected, abs=1e-9)
    assert PairWiseLoss()(chosen, rejected).item() == pytest.approx(expected, abs=1e-9)


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


def test_hard_labels_compete_among_the_reward_tokens():
    logits = step_logits()
    loss = PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, logits, labels_at_steps(GOOD, BAD, BAD))
    pairs = [softmax([logits[place][GOOD].item(), logits[place][BAD].item()]) for place in STEPS]
    expected = -(math.log(pairs[0][0]) + math.log(pairs[1][1]) + math.log(pairs[2][1])) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_hard_labels_without_reward_tokens_compete_in_the_whole_vocabulary():
    logits = step_logits()
    loss = PRMLoss(PLACEHOLDER)(INPUTS, logits, labels_at_steps(GOOD, BAD, 7))
    chosen = [softmax(logits[place].tolist())[label] for place, label in zip(STEPS, (GOOD, BAD, 7), strict=True)]
    assert loss.item() == pytest.approx(-sum(math.log(p) for p in chosen) / 3, abs=1e-6)


def test_soft_labels_are_the_probability_of_the_first_reward_token():
    logits = step_logits()
    soft = (0.9, 0.25, 0.0)
    loss = PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, logits, labels_at_steps(*soft, elsewhere=0.7))
    expected = 0.0
    for place, label in zip(STEPS, soft, strict=True):
        good, bad = softmax([logits[place][GOOD].item(), logits[place][BAD].item()])
        expected -= (label * math.log(good) + (1 - label) * math.log(bad)) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("labels", "reward_tokens"), [((GOOD, -100, BAD), [GOOD, BAD]), ((1.0, -100.0, 0.0), [4, 2])])
def test_an_ignored_step_does_not_count(labels, reward_tokens):
    logits = step_logits()
    loss = PRMLoss(PLACEHOLDER, reward_tokens)(INPUTS, logits, labels_at_steps(*labels))
    first = softmax([logits[0, 1, GOOD].item(), logits[0, 1, BAD].item()])[0]
    last = softmax([logits[1, 0, GOOD].item(), logits[1, 0, BAD].item()])[1]
    assert loss.item() == pytest.approx(-(math.log(first) + math.log(last)) / 2, abs=1e-6)


def test_labels_at_other_tokens_than_placeholders_are_never_read():
    logits = step_logits()
    loss = PRMLoss(PLACEHOLDER, [GOOD, BAD])
    quiet, noisy = (loss(INPUTS, logits, labels_at_steps(GOOD, BAD, BAD, elsewhere=e)) for e in (-100, 8))
    assert quiet.item() == noisy.item()


@pytest.mark.parametrize(("labels", "share"), [((GOOD, GOOD, BAD), 2 / 3), ((0.9, 0.6, 0.2), 2 / 3)])
def test_accuracy_is_the_share_of_steps_whose_likelier_reward_token_is_the_label(labels, share):
    logits = torch.zeros(2, 4, VOCAB)
    logits[..., 7] = 50.0  # the likeliest token of all, but no reward token
    logits[0, 1, GOOD], logits[0, 3, BAD], logits[1, 0, BAD] = 1.0, 1.0, 1.0
    _, accuracy = PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, logits, labels_at_steps(*labels), return_acc=True)
    assert accuracy.item() == pytest.approx(share)


def test_a_batch_without_any_step_has_loss_and_accuracy_zero():
    logits = torch.zeros(2, 4, VOCAB, requires_grad=True)
    loss, accuracy = PRMLoss(8, [GOOD, BAD])(INPUTS, logits, labels_at_steps(GOOD, BAD, BAD), return_acc=True)
    loss.backward()
    assert (loss.item(), accuracy.item()) == (0.0, 0.0)
    assert logits.grad is not None
    assert bool((logits.grad == 0).all())


def test_only_the_reward_tokens_at_placeholders_get_a_gradient():
    logits = step_logits().requires_grad_()
    PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, logits, labels_at_steps(GOOD, BAD, BAD)).backward()
    assert logits.grad is not None
    touched = {tuple(index) for index in logits.grad.nonzero().tolist()}
    assert touched == {(*place, token) for place in STEPS for token in (GOOD, BAD)}
    good = softmax([logits[0, 1, GOOD].item(), logits[0, 1, BAD].item()])[0]
    assert logits.grad[0, 1, GOOD].item() == pytest.approx((good - 1) / 3, abs=1e-6)


def test_a_label_that_is_no_reward_token_is_refused():
    with pytest.raises(ValueError, match=r"labels \[7\] at placeholder positions are not among .*\[4, 2\]"):
        PRMLoss(PLACEHOLDER, [GOOD, BAD])(INPUTS, step_logits(), labels_at_steps(GOOD, 7, BAD))


@pytest.mark.parametrize("reward_tokens", [None, [GOOD], [GOOD, BAD, 5]])
def test_soft_labels_need_exactly_two_reward_tokens(reward_tokens):
    with pytest.raises(ValueError, match="exactly two reward_token_ids"):
        PRMLoss(PLACEHOLDER, reward_tokens)(INPUTS, step_logits(), labels_at_steps(0.5, 0.5, 0.5))
