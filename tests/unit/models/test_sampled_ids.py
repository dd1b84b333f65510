"""Which ids can be sampled, and log-probs over them against a loop over the columns that are kept."""

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig

from openppo.models import Actor
from openppo.models import log_probs as module
from openppo.models.log_probs import linear_log_probs, log_probs_and_entropy, log_probs_from_logits
from openppo.models.pretrained import sampled_ids
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.types import ModelInputs

ROWS, VOCAB, KEPT = 7, 11, [0, 1, 3, 5, 6, 7]
IDS = SampledIds((range(2, 3), range(4, 5), range(8, 11)), {2: "image", 4: "video"})
LETTERS = 30
"""Ids that the tokenizer of ``make_tokenizer`` knows."""


def image_model(n_logits, image=6):
    text = LlamaConfig(vocab_size=n_logits)
    return LlavaConfig(text_config=text, image_token_index=image)


def by_definition(logits, labels, temperature):
    """Log-probs and entropy (N, 2), row by row, of softmax over the kept columns, in float64."""
    found = []
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        kept = torch.log_softmax(row[KEPT] / temperature, -1)
        found.append(torch.stack([kept[KEPT.index(label)], -(kept.exp() * kept).sum()]))
    return torch.stack(found)


@pytest.fixture(params=[1, 3 * VOCAB, 1 << 24])
def chunked(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_ON_CPU", request.param)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE_ON_CPU", request.param)


def random_rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 4).to(dtype)
    labels = torch.tensor(KEPT)[torch.randint(0, len(KEPT), (ROWS,), generator=generator)]
    return (
        logits.requires_grad_(),
        labels,
        torch.randn(ROWS, 2, generator=generator, dtype=torch.float64),
    )


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradient_are_over_sampled_ids(dtype, temperature):
    logits, labels, weights = random_rows(dtype)
    before, exact_logits = logits.detach().clone(), logits.detach().double().requires_grad_()
    found = torch.stack(log_probs_and_entropy(logits, labels, temperature, sampled_ids=IDS), -1)
    exact = by_definition(exact_logits, labels, temperature)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)
    alone = log_probs_from_logits(logits, labels, temperature, sampled_ids=IDS)
    torch.testing.assert_close(alone.double(), exact[:, 0], rtol=1e-6, atol=2e-6)
    assert torch.equal(logits, before), "they belong to the model"
    (gradient,) = torch.autograd.grad((found.double() * weights).sum(), logits)
    (exact_gradient,) = torch.autograd.grad((exact * weights).sum(), exact_logits)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=rounding, atol=4e-6)
    assert gradient[:, [2, 4, 8, 9, 10]].count_nonzero() == 0


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("bias", [False, True])
def test_a_heads_log_probs_and_gradients_are_over_sampled_ids(bias):
    _, labels, weights = random_rows()
    torch.manual_seed(2)
    head, hidden = (
        torch.nn.Linear(4, VOCAB, bias=bias).double(),
        torch.randn(ROWS, 4).double().requires_grad_(),
    )
    leaves = [hidden, *head.parameters()]
    found = linear_log_probs(head, labels, 0.7, True, hidden, sampled_ids=IDS)
    exact = by_definition(head(hidden), labels, 0.7)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((x * weights).sum(), leaves) for x in (found, exact)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for of_head in gradients[0][1:]:
        assert of_head[[2, 4, 8, 9, 10]].count_nonzero() == 0
    options = {"sampled_ids": IDS}
    assert torch.autograd.gradcheck(
        lambda x: linear_log_probs(head, labels, 0.7, True, x, **options), hidden
    )


def test_labels_that_are_left_out_spoil_no_gradient_of_others():
    logits, labels, _ = random_rows()
    labels[1], labels[4] = 2, 10
    found = log_probs_from_logits(logits, labels, sampled_ids=IDS)
    assert [t for t, x in enumerate(found.tolist()) if x == -torch.inf] == [1, 4]
    counted = torch.tensor([True, False, True, True, False, True, True])
    (gradient,) = torch.autograd.grad(torch.where(counted, found, 0.0).sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[[1, 4]].count_nonzero() == 0


@pytest.mark.parametrize("ends_in_head", [True, False])
def test_an_actor_leaves_ids_out_unless_it_is_to_read_given_texts(models, ends_in_head):
    actor = Actor(models["llama"], temperature=0.7)
    actor.ends_in_head = ends_in_head
    actor.normalize_over(SampledIds((range(5, 6), range(20, 24))))
    sequences = torch.tensor([[1, 2, 3, 4, 19], [5, 3, 22, 6, 7]])
    mask, actions = (
        torch.ones_like(sequences).bool(),
        torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 1]]).bool(),
    )
    logits = models["llama"](sequences).logits.detach()[:, :-1] / 0.7
    whole = actor(ModelInputs(sequences, mask), whole_vocabulary=True).detach()[:, 1:]
    torch.testing.assert_close(
        whole, logits.log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0]
    )
    logits[..., [5, 20, 21, 22, 23]] = -torch.inf
    distribution = torch.distributions.Categorical(logits=logits)
    log_probs, entropy = actor(ModelInputs(sequences, mask), actions, return_entropy=True)
    expected = torch.where(actions[:, 1:], distribution.log_prob(sequences[:, 1:]), 0.0)
    torch.testing.assert_close(log_probs.detach()[:, 1:], expected)
    torch.testing.assert_close(
        entropy.detach()[:, 1:],
        torch.where(actions[:, 1:], distribution.entropy(), 0.0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_ids_are_those_that_the_tokenizer_knows(make_tokenizer):
    tokenizer = make_tokenizer()
    assert sampled_ids(tokenizer, LlamaConfig(vocab_size=LETTERS)) == ALL_IDS
    assert (
        sampled_ids(tokenizer, LlamaConfig(vocab_size=LETTERS - 4)) == ALL_IDS
    )  # as Gemma 3 of 1B
    ids = sampled_ids(tokenizer, LlamaConfig(vocab_size=LETTERS + 2))
    assert ids.left_out == (range(LETTERS, LETTERS + 2),)
    assert str(ids) == "2 that the tokenizer does not know, up to 31"
    more = sampled_ids(tokenizer, LlamaConfig(vocab_size=LETTERS), n_logits=40)  # of a reference
    assert more.left_out == (range(LETTERS, 40),)


def test_ids_of_images_are_left_out_among_those_that_are_known(make_tokenizer):
    ids = sampled_ids(make_tokenizer(), image_model(LETTERS + 2))
    assert ids.left_out == (range(6, 7), range(LETTERS, LETTERS + 2))
    assert str(ids) == "6 (images), 2 that the tokenizer does not know, up to 31"
    assert (5 in ids, 6 in ids, 29 in ids, 31 in ids) == (True, False, True, False)
    assert ids.first(7) == [0, 1, 2, 3, 4, 5, 7]
    beyond = sampled_ids(make_tokenizer(), image_model(LETTERS + 2, image=31))
    assert beyond.left_out == (range(LETTERS, LETTERS + 2),)
    assert str(beyond) == "31 (images), 1 that the tokenizer does not know, up to 31"


def test_tokens_of_equal_text_are_all_known():
    class Slow:
        """Of its four tokens two are written alike."""

        vocab_size = 4

        def get_vocab(self):
            return {"a": 0, "b": 1, "\ufffd": 3, "<new>": 5}

    ids = sampled_ids(Slow(), LlamaConfig(vocab_size=8))
    assert ids.left_out == (range(4, 5), range(6, 8))


def test_ends_that_are_never_sampled_are_refused():
    IDS.check_ends([1, 9], [3])
    IDS.check_ends([], [])
    with pytest.raises(ValueError) as error:
        IDS.check_ends([1], [3, 9])
    unknown = "the id 9 is never sampled, as the tokenizer does not know it."
    assert str(error.value) == f"--stop_token_ids: {unknown} Leave it out, or use another id."
    with pytest.raises(ValueError) as error:
        IDS.check_ends([9, 10], [])
    assert str(error.value) == (
        f"--pretrain: no response could end with EOS: {unknown} Set eos_token_id in generation_config.json to a token "
        "of the tokenizer, or add that token to the tokenizer."
    )
    with pytest.raises(
        ValueError, match="--stop_token_ids: the id 2 is never sampled, as it stands for images"
    ):
        IDS.check_ends([], [2])
