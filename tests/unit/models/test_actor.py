"""The policy against the plain Hugging Face model, read row by row without padding."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from openppo.models import Actor
from openppo.models import log_probs as module
from openppo.models.actor import ends_in_head, float32_head, next_logits
from openppo.models.log_probs import linear_logits
from openppo.types import ModelInputs
from tests.architectures import tiny_config

ROWS = [
    [5, 9, 2, 17, 30, 8, 2],
    [11, 2, 3],
    [7, 21, 38, 4, 2],
]  # 2 is the end of a sequence, also in the middle
ACTIONS = [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0], [0, 0, 0, 0, 0]]  # holes, one action, no action at all


def padded(rows, width=7, pad=0):
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def attention(width=7):
    return padded([[1] * len(row) for row in ROWS], width).bool()


ACTION_MASK = padded(ACTIONS).bool()


def plain(model, width=7, temperature=1.0):
    """Log-probs and entropies of each token but the first, (B, L) float64; differentiable."""
    log_probs, entropies = (torch.zeros(len(ROWS), width, dtype=torch.float64) for _ in range(2))
    for b, row in enumerate(ROWS):
        distributions = (
            model(input_ids=torch.tensor([row])).logits[0].double() / temperature
        ).log_softmax(-1)
        log_probs[b, 1 : len(row)] = distributions[range(len(row) - 1), row[1:]]
        entropies[b, 1 : len(row)] = -(distributions.exp() * distributions).sum(-1)[:-1]
    return log_probs, entropies


def same(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [None, ACTION_MASK], ids=["all", "holes"])
@pytest.mark.parametrize(("temperature", "at_once"), [(1.0, 1 << 29), (0.7, 1 << 29), (0.7, 100)])
def test_log_probs_and_entropy_are_those_of_the_plain_model(
    any_causal, temperature, at_once, mask, monkeypatch
):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE_ON_CPU", at_once)
    model = any_causal().double().eval()
    inputs = ModelInputs(padded(ROWS), attention()), mask
    log_probs, entropy = Actor(model, temperature=temperature)(*inputs, return_entropy=True)
    for found, expected in zip(
        (log_probs, entropy), plain(model, temperature=temperature), strict=True
    ):
        expected = expected if mask is None else torch.where(mask, expected, 0.0)
        same(found, expected)
        gradients = (
            torch.autograd.grad(x.sum(), list(model.parameters()), retain_graph=True)
            for x in (found, expected)
        )
        for pair in zip(*gradients, strict=True):
            same(*pair)
    of_call = Actor(model, temperature=5.0)(*inputs, temperature=temperature)
    assert torch.equal(of_call, log_probs), "the temperature of the call replaces that of the actor"
    filler = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    wide = Actor(model)(
        ModelInputs(torch.where(attention(12), padded(ROWS, 12), filler), attention(12))
    )
    same(wide, plain(model, width=12)[0])  # padding holds anything


@pytest.mark.parametrize("make_mask", [torch.ones, torch.zeros])
@pytest.mark.parametrize("length", [1, 4])
def test_the_first_token_has_no_log_prob_and_rows_without_action_take_part(
    any_causal, length, make_mask
):
    """Other ranks may be at work in the backward pass: this one must take part."""
    actor, mask = Actor(any_causal()), make_mask(2, length, dtype=torch.bool)
    ids = torch.tensor([[5, 9, 2, 17]] * 2)[:, :length]
    found, entropy = actor(ModelInputs(ids, torch.ones_like(mask)), mask, return_entropy=True)
    assert torch.equal(found != 0, mask & (torch.arange(length) > 0))
    (found + entropy).sum().backward()
    gradients = [p.grad for p in actor.parameters() if p.grad is not None]
    assert gradients
    assert any(gradient.any() for gradient in gradients) == (length > 1 and bool(mask.any()))


def test_logits_are_computed_only_where_some_row_asks(llama):
    actor, seen = Actor(llama()), []
    actor.model.lm_head.register_forward_pre_hook(
        lambda module, inputs: seen.append(tuple(inputs[0].shape))
    )
    actor(ModelInputs(padded(ROWS), attention()), ACTION_MASK)
    assert [shape[:2] for shape in seen] == [(3, 4)]  # tokens 1, 2, 3 and 6


DROPOUT = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "llama": {"attention_dropout": 0.5},
}


@pytest.mark.parametrize(
    ("name", "changed", "ends"),
    [
        *((name, {}, True) for name in ("llama", "gpt2", "qwen2", "mistral", "gpt_neox", "gemma")),
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("cohere", {"logit_scale": 0.5}, False),
        ("granite", {"logits_scaling": 2.0}, False),
    ],
)
def test_only_logits_that_a_linear_head_returns_are_computed_in_pieces(name, changed, ends):
    assert ends_in_head(AutoModelForCausalLM.from_config(tiny_config(name, **changed))) == ends


def test_sampling_takes_logits_of_a_bfloat16_head_in_float32(llama):
    """On GPUs, where training does: near 30 bfloat16 has steps of an eighth."""
    llama, gpu, cpu = llama(), torch.device("cuda"), torch.device("cpu")
    assert float32_head(llama, gpu) is float32_head(llama.bfloat16(), cpu) is None
    head = float32_head(llama, gpu)
    assert head is llama.lm_head is float32_head(Actor(llama, lora_rank=2, lora_alpha=4).model, gpu)
    ids = padded(ROWS)
    assert torch.equal(next_logits(llama, head, input_ids=ids), llama(ids).logits[:, -1])
    with FakeTensorMode():
        hidden, weight, bias = (
            torch.empty(*n, dtype=torch.bfloat16, device="cuda") for n in ((3, 8), (40, 8), (40,))
        )
        for logits in (linear_logits(hidden, weight, None), linear_logits(hidden, weight, bias)):
            assert (logits.shape, logits.dtype, logits.device.type) == (
                (3, 40),
                torch.float32,
                "cuda",
            )


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_is_off_even_in_training_mode(kind, request):
    make, ids = request.getfixturevalue(kind), padded(ROWS)
    with_dropout = make(**DROPOUT[kind]).train()
    assert not torch.equal(
        *(with_dropout(input_ids=ids).logits for _ in range(2))
    )  # else this test claims nothing
    actor = Actor(make(**DROPOUT[kind])).train()
    assert torch.equal(*(actor(ModelInputs(ids, attention())) for _ in range(2)))
    torch.testing.assert_close(
        actor(ModelInputs(ids, attention())),
        Actor(make())(ModelInputs(ids, attention())),
        rtol=0,
        atol=1e-5,
    )


def test_a_folder_gives_the_policy_saved_there_in_the_precision_asked_for(any_causal, tmp_path):
    any_causal().save_pretrained(tmp_path)  # GPT-2 without its head, which is tied to the embedding
    same(
        Actor(str(tmp_path))(ModelInputs(padded(ROWS), attention())),
        Actor(any_causal())(ModelInputs(padded(ROWS), attention())),
    )
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        actor = Actor(str(tmp_path), bf16=bf16)
        assert {p.dtype for p in actor.parameters()} == {dtype}
        found = actor(ModelInputs(padded(ROWS), attention()), return_entropy=True)
        assert [tensor.dtype for tensor in found] == [torch.float32] * 2


def test_a_checkpoint_without_a_language_model_head_is_refused(llama, tmp_path):
    llama().model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*random"):
        Actor(str(tmp_path))


def test_flash_attn_needs_its_package_and_bf16(llama_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for bf16, says in ((True, "pip install flash-attn"), (False, "--flash_attn needs --bf16")):
        with pytest.raises(ValueError, match=says):
            Actor(str(llama_folder), flash_attn=True, bf16=bf16)
