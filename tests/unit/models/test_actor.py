"""The policy against the plain Hugging Face model, read row by row without padding."""

import sys

import pytest
import torch

from openppo.models import Actor
from openppo.models.loading import attention_implementation

ROWS = [[5, 9, 2, 17, 30, 8, 2], [11, 2, 3], [7, 21, 38, 4, 2]]  # 2 is the end of a sequence, also in the middle
LENGTHS = [len(row) for row in ROWS]
ACTIONS = [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0], [0, 0, 0, 0, 0]]  # holes, one action, no action at all
TIGHT = 1e-6


def padded(rows, width, pad=0):
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def attention(width=7):
    return padded([[1] * length for length in LENGTHS], width).bool()


def action_mask(width=7):
    return padded(ACTIONS, width).bool()


def plain_distributions(model, row, temperature=1.0):
    """(length, V): log softmax in float64 at each token of one row."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row])).logits[0]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def plain_log_probs(model, width=7, temperature=1.0):
    expected = torch.zeros(len(ROWS), width, dtype=torch.float64)
    for b, row in enumerate(ROWS):
        distributions = plain_distributions(model, row, temperature)
        for t in range(1, len(row)):
            expected[b, t] = distributions[t - 1, row[t]]
    return expected


def plain_entropy(model, temperature=1.0):
    expected = torch.zeros(len(ROWS), 7, dtype=torch.float64)
    for b, row in enumerate(ROWS):
        distributions = plain_distributions(model, row, temperature)
        for t in range(1, len(row)):
            expected[b, t] = -(distributions[t - 1].exp() * distributions[t - 1]).sum()
    return expected


def same(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TIGHT)


def test_log_probs_are_those_of_the_plain_model_aligned_with_the_tokens(any_causal):
    model = any_causal().double().eval()
    same(Actor(model)(padded(ROWS, 7), attention()), plain_log_probs(model))


def test_entropy_is_that_of_the_distribution_each_token_came_from(any_causal):
    model = any_causal().double().eval()
    log_probs, entropy = Actor(model, temperature=0.7)(padded(ROWS, 7), attention(), return_entropy=True)
    same(log_probs, plain_log_probs(model, temperature=0.7))
    same(entropy, plain_entropy(model, temperature=0.7))


def test_extra_padding_changes_nothing_whatever_it_holds(any_causal):
    model = any_causal().double().eval()
    filler = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    wide = torch.where(attention(12), padded(ROWS, 12), filler)
    found = Actor(model)(wide, attention(12))
    same(found, plain_log_probs(model, width=12))
    assert bool((found[~attention(12)] == 0).all())


def test_a_temperature_given_to_the_call_replaces_that_of_the_actor(llama):
    model = llama().double().eval()
    actor = Actor(model, temperature=0.5)
    same(actor(padded(ROWS, 7), attention()), plain_log_probs(model, temperature=0.5))
    same(actor(padded(ROWS, 7), attention(), temperature=1.3), plain_log_probs(model, temperature=1.3))


def test_an_action_mask_with_holes_selects_without_changing(any_causal):
    model = any_causal().double().eval()
    log_probs, entropy = Actor(model)(padded(ROWS, 7), attention(), action_mask(), return_entropy=True)
    same(log_probs, torch.where(action_mask(), plain_log_probs(model), 0.0))
    same(entropy, torch.where(action_mask(), plain_entropy(model), 0.0))


def test_the_first_token_has_no_log_prob_even_if_it_is_asked_for(llama):
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    found = Actor(llama())(torch.tensor([[5, 9, 2, 17]]), everywhere, everywhere)
    assert found[0, 0].item() == 0.0
    assert bool((found[0, 1:] < 0).all())


@pytest.mark.parametrize("make_mask", [torch.ones, torch.zeros])
def test_a_sequence_of_one_token_has_no_log_prob_but_takes_part(llama, make_mask):
    actor = Actor(llama())
    found, entropy = actor(torch.tensor([[5]]), make_mask(1, 1, dtype=torch.bool), return_entropy=True)
    assert (found.tolist(), entropy.tolist()) == ([[0.0]], [[0.0]])
    (found + entropy).sum().backward()
    gradients = [p.grad for p in actor.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_logits_are_computed_only_where_some_row_asks(llama):
    model = llama()
    seen: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    Actor(model)(padded(ROWS, 7), attention(), action_mask())
    assert seen == [(3, 4, 40)]  # tokens 1, 2, 3 and 6


def test_without_any_action_the_result_is_zero_and_so_is_the_gradient(any_causal):
    actor = Actor(any_causal())
    found, entropy = actor(padded(ROWS, 7), attention(), torch.zeros(3, 7, dtype=torch.bool), return_entropy=True)
    assert bool((found == 0).all())
    assert bool((entropy == 0).all())
    found.sum().backward()  # other ranks may be at work: this one must take part in the backward pass
    gradients = [p.grad for p in actor.parameters() if p.grad is not None]
    assert gradients
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_the_gradient_of_log_probs_equals_that_of_the_plain_model(llama):
    model, plain = llama().double(), llama().double()
    Actor(model, temperature=0.8)(padded(ROWS, 7), attention(), action_mask()).sum().backward()
    total = torch.zeros((), dtype=torch.float64)
    for row, actions in zip(ROWS, ACTIONS, strict=True):
        log_probs = torch.log_softmax(plain(input_ids=torch.tensor([row])).logits[0] / 0.8, -1)
        for t, is_action in enumerate(actions):
            if is_action:
                total = total + log_probs[t - 1, row[t]]
    total.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        same(found.grad, expected.grad)


DROPOUT = {"gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}, "llama": {"attention_dropout": 0.5}}


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_is_off_even_in_training_mode(kind, request):
    make, ids = request.getfixturevalue(kind), padded(ROWS, 7)
    plain = make(**DROPOUT[kind]).train()
    first, second = (plain(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(first, second)  # else this test would claim nothing
    actor = Actor(make(**DROPOUT[kind])).train()
    first, second = (actor(ids, attention()) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, Actor(make())(ids, attention()), rtol=0, atol=1e-5)


def test_a_bfloat16_model_gives_float32_log_probs(llama):
    model = llama().bfloat16().eval()
    log_probs, entropy = Actor(model)(padded(ROWS[:1], 7), attention()[:1], return_entropy=True)
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    same(log_probs, plain_log_probs(model)[:1])


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_folder_loads_in_the_precision_asked_for(llama_folder, bf16, dtype):
    actor = Actor(str(llama_folder), bf16=bf16)
    assert {p.dtype for p in actor.parameters()} == {dtype}


def test_a_folder_gives_the_same_policy_as_the_model_saved_there(any_causal, tmp_path):
    any_causal().save_pretrained(tmp_path)  # GPT-2 without its head, which is tied to the embedding
    same(Actor(str(tmp_path))(padded(ROWS, 7), attention()), Actor(any_causal())(padded(ROWS, 7), attention()))


def test_a_checkpoint_without_a_language_model_head_is_refused(llama, tmp_path):
    llama().model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*random"):
        Actor(str(tmp_path))


def test_adapters_start_as_the_identity(any_causal):
    actor = Actor(any_causal().double(), lora_rank=2)
    same(actor(padded(ROWS, 7), attention()), plain_log_probs(any_causal().double().eval()))


def test_flash_attn_without_the_package_says_how_to_install_it(llama_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install flash-attn"):
        Actor(str(llama_folder), flash_attn=True, bf16=True)
    with pytest.raises(ValueError, match="--flash_attn needs --bf16"):
        Actor(str(llama_folder), flash_attn=True)


def test_flash_attn_is_never_imported_unless_asked_for(llama_folder, tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise RuntimeError('imported although unused')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    Actor(str(llama_folder))(padded(ROWS, 7), attention())
    assert "flash_attn" not in sys.modules
    assert attention_implementation(flash_attn=False, bf16=False) is None
    assert attention_implementation(flash_attn=True, bf16=True) == "flash_attention_2"  # found, not imported
    assert "flash_attn" not in sys.modules
