"""Examples become equally many micro-batches on all ranks; what shares a row keeps the numbers that it has alone."""

import copy
import dataclasses

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from openppo.datasets import TokenExample
from openppo.models import Actor, attention
from openppo.models.attention import BY_LENGTHS
from openppo.models.padding import pack_where_exact, packing_is_exact
from openppo.models.scalar_head import ScalarHeadModel
from openppo.trainer.supervised.batches import pack, token_batch
from openppo.types import ModelInputs, SingleProcess
from tests.unit.trainer.conftest import OneOf
from tests.varlen import VarlenLoop

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
COMMON = {"vocab_size": 40, "pad_token_id": 0, "num_labels": 1}
CONFIGS = {
    "llama": lambda **options: LlamaConfig(**COMMON, **SIZES, **options),
    "qwen2": lambda **options: Qwen2Config(**COMMON, **SIZES, num_key_value_heads=2, **options),
    "mistral": lambda **options: MistralConfig(
        **COMMON, **SIZES, num_key_value_heads=1, sliding_window=3, **options
    ),
    "gpt_neox": lambda **options: GPTNeoXConfig(**COMMON, **SIZES, **options),
    "gpt2": lambda **options: GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, **options),
}


def model_of(
    name,
    implementation="sdpa",
    dtype=torch.float32,
    initializer_range=0.2,
    auto=AutoModelForCausalLM,
):
    torch.manual_seed(5)
    config = CONFIGS[name](attn_implementation=implementation, initializer_range=initializer_range)
    return auto.from_config(config).to(dtype).eval()


def actor_of(name, *options, **more):
    return Actor(model_of(name, *options, **more), temperature=1.3)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Those of torch's operator."""
    loop = VarlenLoop()
    monkeypatch.setattr(attention, "varlen_attn", loop)
    return loop.calls


PAD = 9


def example(*ids, first=1):
    """Targets are the tokens from ``first`` on."""
    return TokenExample(list(ids), [t >= first for t in range(len(ids))])


def test_rows_are_padded_on_the_right_and_packed_ones_start_anew_at_each_document():
    batch = token_batch([example(4, PAD, 5, first=2), example(PAD, PAD)], 2, PAD, SingleProcess())
    [(inputs, loss_mask)] = batch.micro_batches
    assert inputs.sequences.tolist() == [[4, PAD, 5], [PAD, PAD, PAD]]
    assert inputs.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert loss_mask.tolist() == [[False, False, True], [False, True, False]]
    assert (inputs.sequences.dtype, inputs.position_ids) == (torch.int64, None)
    examples = [example(1, 2, 3, first=0), example(4, 5, first=0), example(6, 7)]
    [packed] = token_batch(examples, 2, PAD, SingleProcess(), pack_to=6).micro_batches
    assert packed.inputs.sequences.tolist() == [[1, 2, 3, 4, 5], [6, 7, PAD, PAD, PAD]]
    assert packed.inputs.attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert packed.loss_mask.int().tolist() == [
        [0, 1, 1, 0, 1],
        [0, 1, 0, 0, 0],
    ]  # no document's first token
    assert packed.inputs.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("pack_to", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 3, 10])
def test_every_example_with_a_target_is_used_once_in_equally_many_micro_batches(
    world_size, micro, pack_to
):
    examples = [
        example(*range(number, number + 2 + number % 3), first=0) for number in range(0, 70, 10)
    ]  # 19 tokens
    without = [example(1), example(2, first=0), example(3, 4, 5, first=3)]
    ranks = [OneOf(rank, world_size) for rank in range(world_size)]
    batches = [token_batch([*without, *examples], micro, PAD, rank, pack_to) for rank in ranks]
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert {batch.n_targets for batch in batches} == {sum(len(e.token_ids) - 1 for e in examples)}
    tensors = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    targets = [token for m in tensors for token in m.inputs.sequences[m.loss_mask].tolist()]
    assert sorted(targets) == sorted(token for e in examples for token in e.token_ids[1:])
    assert max(len(m.inputs) for m in tensors) <= micro
    assert pack_to is None or all(m.inputs.position_ids is not None for m in tensors)
    of_none = token_batch(without, micro, PAD, ranks[0], pack_to)
    assert (len(of_none.micro_batches), of_none.n_targets) == (1, 0), (
        "a forward that counts for nothing"
    )


def documents(lengths):
    """Documents of random tokens; the loss leaves out every fourth token."""
    generator = torch.Generator().manual_seed(6)
    return [
        TokenExample(
            torch.randint(0, 40, (n,), generator=generator).tolist(), [t % 4 != 3 for t in range(n)]
        )
        for n in lengths
    ]


DOCUMENTS = documents([9, 3, 1, 12, 5, 2, 7, 4])


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def log_probs_and_gradient(actor, batch):
    """Log-probs of all targets, sorted, and the gradient of their sum."""
    actor.zero_grad()
    found = []
    for micro in batch.micro_batches:
        log_probs = actor(micro.inputs, micro.loss_mask, temperature=1.0)
        found += log_probs[micro.loss_mask].tolist()
        log_probs.sum().backward()
    return sorted(found), gradient_of(actor)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", BY_LENGTHS])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_documents_have_the_numbers_they_have_alone(name, implementation, calls):
    assert packing_is_exact(actor_of(name, implementation, torch.bfloat16), CPU)
    actor = actor_of(name, implementation)
    pack_where_exact(actor, actor, CPU, "actor")
    assert actor.packs_rows == (implementation == BY_LENGTHS) and packing_is_exact(actor, CPU)
    alone, gradient = log_probs_and_gradient(actor, token_batch(DOCUMENTS, 1, 0, SingleProcess()))
    packed = token_batch(DOCUMENTS, 2, 0, SingleProcess(), pack_to=16)
    assert len(packed.micro_batches) == 2  # 42 tokens in 3 rows
    calls.clear()
    together, packed_gradient = log_probs_and_gradient(actor, packed)
    assert len(calls) == (4 if actor.packs_rows else 0), "two layers, twice"
    assert together == pytest.approx(alone, abs=1e-5)
    torch.testing.assert_close(packed_gradient, gradient, rtol=1e-4, atol=1e-5)


def without_restart(inputs):
    """An actor that separates documents but embeds their tokens at their place in the row."""
    starts = (inputs.position_ids == 0).cumsum(-1)
    places = torch.arange(inputs.sequences.shape[1]) + 10 * starts
    return actor_of("gpt2")(dataclasses.replace(inputs, position_ids=places))


def refuse(inputs):
    raise TypeError("unexpected keyword argument 'position_ids'")


def test_the_probe_finds_models_that_cannot_and_says_so(caplog):
    llama = actor_of("llama", initializer_range=0.02)  # mixes documents only a little
    for model, reason in (
        (
            lambda inputs: llama(dataclasses.replace(inputs, position_ids=None)),
            "each other's outputs",
        ),
        (without_restart, "their own by their place"),
        (refuse, "unexpected keyword argument 'position_ids'"),
    ):
        caplog.clear()
        assert not packing_is_exact(model, CPU)
        assert reason in caplog.text and "documents are not packed" in caplog.text


def test_rounding_of_large_logits_is_no_mixing(calls, monkeypatch):
    """A kernel that rounds otherwise, by a step of bfloat16, where a row holds several documents."""
    exact = attention.varlen_attn
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *x, **more: exact(*x, **more) * (1 + (len(x[3]) > 2) / 128)
    )
    actor = actor_of("qwen2", BY_LENGTHS, torch.bfloat16)
    actor.model.get_output_embeddings().weight.data *= 16
    ids, mask = torch.tensor([[2, 0, 1], [3, 3, 1]]), torch.ones(2, 3, dtype=torch.bool)
    padded = actor(ModelInputs(ids, mask))
    pack_where_exact(actor, actor, CPU, "actor")
    assert actor.packs_rows and packing_is_exact(actor, CPU)
    assert (actor(ModelInputs(ids, mask)) - padded).abs().max() > 0.05, (
        "an absolute bound would refuse it"
    )


def test_rows_are_filled_by_first_fit_of_the_longest_first():
    def packed(examples, max_len):
        return [[len(example.token_ids) for example in row] for row in pack(examples, max_len)]

    assert packed(documents([2, 7, 3, 5, 4, 6]), 10) == [[7, 3], [6, 4], [5, 2]]
    assert packed(documents([12, 3, 10]), 10) == [[12], [10], [3]]  # too long for any row: alone


@pytest.fixture
def samples():
    """Inputs, and an action mask with holes, (5, 7); one row has no action."""
    sequences = torch.randint(1, 40, (5, 7), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.arange(7) < torch.tensor([7, 2, 5, 7, 1])[:, None]
    action_mask = attention_mask & (torch.arange(7) >= 1) & (torch.arange(7) != 4)
    action_mask[1] = False
    return ModelInputs(torch.where(attention_mask, sequences, 0), attention_mask), action_mask


def outputs_and_gradient(model, role, samples, packs):
    """All that is read of a batch, and the gradient of a sum that weighs every place differently."""
    model = copy.deepcopy(model)
    if packs:
        pack_where_exact(model, model, CPU, "model")
        assert model.packs_rows
    if role == "actor":
        outputs = torch.stack([*model(*samples, return_entropy=True), model(samples[0])])
    else:
        outputs = model(samples[0])
        outputs = (
            torch.where(samples[0].attention_mask, outputs, 0.0) if role == "critic" else outputs
        )
    (outputs * torch.linspace(-1, 2, outputs.numel()).view(outputs.shape)).sum().backward()
    return outputs, gradient_of(model)


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gpt2"])
def test_unpadded_samples_have_the_outputs_and_gradients_of_padded_ones(name, role, samples, calls):
    model = actor_of(name, BY_LENGTHS)
    if role != "actor":
        model = ScalarHeadModel(
            model_of(name, BY_LENGTHS, auto=AutoModelForSequenceClassification), role
        )
    padded = outputs_and_gradient(model, role, samples, packs=False)
    assert calls == []
    unpadded = outputs_and_gradient(model, role, samples, packs=True)
    torch.testing.assert_close(unpadded, padded, rtol=1e-4, atol=1e-5)
    assert calls[-1].starts.tolist() == [0, 7, 9, 14, 21, 22]
    assert calls[-1].starts is calls[-1].key_starts is calls[-2].starts, (
        "one tensor for both layers"
    )


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
def test_an_unpadded_forward_asks_its_device_for_no_size(role, samples, monkeypatch):
    """Tensors of the device "meta" have no values; a size that depends on them would be an error."""
    shapes = lambda module, queries, *_, **__: (queries.transpose(1, 2), None)  # noqa: E731 (of attention)
    monkeypatch.setitem(AttentionInterface._global_mapping, BY_LENGTHS, shapes)
    model, given = actor_of("llama", BY_LENGTHS), samples
    if role != "actor":
        classifier = model_of("llama", BY_LENGTHS, auto=AutoModelForSequenceClassification)
        model, given = ScalarHeadModel(classifier, role), samples[:1]
    model.to("meta").use_packing(True)
    outputs = model(*given)
    outputs.sum().backward()
    assert (outputs.device.type, outputs.shape) == ("meta", (5,) if role == "reward" else (5, 7))


def test_an_unpadded_batch_without_actions_has_log_probs_of_zero_and_a_backward_pass(
    samples, monkeypatch
):
    actor = actor_of("llama", BY_LENGTHS)
    pack_where_exact(actor, actor, CPU, "actor")
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, BY_LENGTHS, None
    )  # no mask of T x T is made
    log_probs = actor(samples[0], torch.zeros_like(samples[1]))
    log_probs.sum().backward()
    assert actor.packs_rows and not log_probs.any() and not gradient_of(actor).any()


def test_a_model_that_mixes_the_samples_stays_with_padding(caplog):
    class Mixing(Actor):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            return found + args[0].sequences.sum() if self.packs_rows else found

    actor = Mixing(model_of("llama", BY_LENGTHS))
    pack_where_exact(actor, actor, CPU, "actor")
    assert not actor.packs_rows
    assert (
        "samples of the actor are padded: in one row they change each other's outputs by"
        in caplog.text
    )
