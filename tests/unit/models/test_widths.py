"""On CPUs in bfloat16 models read a few more places of padding, so that matrix products come in few shapes."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.models import Actor, ScalarHeadModel
from openppo.models.scalar_head import ProcessRewardModel

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(kind, dtype=torch.bfloat16):
    """With random weights."""
    torch.manual_seed(0)
    return kind(LlamaConfig(vocab_size=50, num_labels=1, pad_token_id=0, **SIZES)).to(dtype)


def widths_read(model):
    """Grows by the width of each batch of ids that the model embeds."""
    widths: list[int] = []
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    embeddings.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    return widths


def log_probs(model, ids, mask):
    """Of all tokens."""
    return Actor(model)(ids, mask)


def values(model, ids, mask):
    """Of all tokens."""
    return ScalarHeadModel(model, "critic")(ids, mask)


def scores(model, ids, mask):
    """Of whole rows."""
    return ScalarHeadModel(model, "reward")(ids, mask)


def steps(model, ids, mask):
    """Logits after the last token of each row."""
    return ProcessRewardModel(model)(ids, mask & ~torch.roll(mask, -1, 1))


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (LlamaForCausalLM, log_probs),
        (LlamaForSequenceClassification, values),
        (LlamaForSequenceClassification, scores),
        (LlamaForCausalLM, steps),
    ],
)
@pytest.mark.parametrize(("length", "width"), [(9, 16), (16, 16), (130, 136), (260, 272)])
def test_what_is_read_and_learned_does_not_depend_on_the_width(kind, read, length, width, monkeypatch):
    ids = torch.randint(1, 50, (3, length))
    mask = torch.arange(length) < torch.tensor([[length], [5], [7]])
    results = []
    for widened in (True, False):
        if not widened:
            monkeypatch.setattr("openppo.models.padding.rounded_width", lambda length: length)
        model = llama(kind)
        widths = widths_read(model)
        output = read(model, ids, mask)
        output.float().sum().backward()
        assert widths == [width if widened else length]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((output.detach().float(), gradient.float()))
    (mine, my_gradient), (other, other_gradient) = results
    assert mine.shape == other.shape
    torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)
    assert (my_gradient - other_gradient).norm() <= 0.02 * other_gradient.norm()


@pytest.mark.parametrize("read", [log_probs, steps])
def test_in_float32_nothing_is_added(read):
    model = llama(LlamaForCausalLM, torch.float32)
    widths = widths_read(model)
    read(model, torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.bool))
    assert widths == [9]


def test_a_model_reads_no_more_places_than_it_has_positions():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(n_positions=13, **sizes)).bfloat16()
    widths = widths_read(model)
    for length in (7, 9, 13):
        Actor(model)(torch.ones(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.bool))
    assert widths == [8, 9, 13]
