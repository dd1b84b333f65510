"""Models that read images give the same numbers, whatever shares a batch with them."""

import copy
import inspect

import pytest
import torch

from openppo.media import MediaItem, TokenIds, distinct_ids
from openppo.models import Actor, attention
from openppo.models.attention import BY_LENGTHS, ON_CPU, use_fast_attention
from openppo.models.loading import freeze_vision
from openppo.models.media_inputs import joined
from openppo.models.padding import extended_mask, with_stand_in
from openppo.models.prefixes import prefix_tree, share_where_exact
from openppo.models.scalar_head import ScalarHeadModel, classifier_of
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.prefill import whole_images
from openppo.strategy.weights import WholeWeights
from openppo.types import ModelInputs, Prompt, SamplingParams
from tests.images import FAMILIES, IMAGE, OPEN, SAMPLED, VIDEO, connected, random_image, with_images
from tests.varlen import VarlenLoop

CPU = torch.device("cpu")
SHAPES = {0: [5, 6, 7, 9], 1: [3, OPEN, 8, 9, 2], 3: [OPEN, 4, OPEN, 5, OPEN, 11]}
"""Prompts by their number of images."""


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    torch.manual_seed(3)
    model = connected(FAMILIES[family]()).eval()
    use_fast_attention(model)
    return model


def prompts_of(family, *counts):
    """Token ids of prompts with so many images each, and the images."""
    media = [
        tuple(random_image(family, 10 * i + k) for k in range(n)) for i, n in enumerate(counts)
    ]
    return [with_images(SHAPES[n], items) for n, items in zip(counts, media, strict=True)], media


def by_transformers(model, ids, items):
    """Logits (L - 1, V) before one row's tokens after the first, by the model's own forward on that row alone."""
    plain, row = copy.deepcopy(model), torch.tensor([ids])
    plain.set_attn_implementation("eager")
    inputs = {}
    for name in items[0].inputs if items else ():
        stacked = torch.cat([item.inputs[name] for item in items])
        inputs[name] = stacked[None] if "pixel_attention_mask" in items[0].inputs else stacked
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(type(plain).forward).parameters and items:
            inputs[name] = (row == IMAGE).long()
    with torch.no_grad():
        return (
            plain(input_ids=row, attention_mask=torch.ones_like(row), **inputs)
            .logits[0, :-1]
            .float()
        )


def test_engine_actor_and_transformers_agree(family, model):
    prompts, media = prompts_of(family, 1, 0, 3, 1)
    # The fourth enters while others are decoded.
    engine = HFEngine(model, [], 0, 3, sampled_ids=SAMPLED)
    with engine.with_weights(WholeWeights(model)):
        requests = [TokenIds(*prompt) for prompt in zip(prompts, media, strict=True)]
        sampled = engine.generate(requests, SamplingParams(7), [1, 2, 3, 4])
    rows = [
        prompt + completion.token_ids for prompt, completion in zip(prompts, sampled, strict=True)
    ]
    inputs = ModelInputs.of_ids(rows, pad_token_id=0).with_media(media)
    actor = Actor(model)
    actor.normalize_over(SAMPLED)
    log_probs = actor(inputs)
    for i, (row, prompt, completion) in enumerate(zip(rows, prompts, sampled, strict=True)):
        logits, ids = by_transformers(model, row, media[i]), torch.tensor(row[1:])[:, None]
        logits[:, [IMAGE, VIDEO]] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, ids)[:, 0]
        torch.testing.assert_close(log_probs[i, 1 : len(row)], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), expected[len(prompt) - 1 :], atol=1e-4, rtol=1e-4
        )


def test_turns_that_continue_a_conversation_with_images_read_only_what_is_new(family, model):
    items = [random_image(family, key) for key in (1, 2, 3)]
    first = with_images([5, OPEN, 6], items[:1])

    def finish(engine, prompts, media, resume, seeds):
        numbers = [
            engine.submit(TokenIds(prompt, of), SamplingParams(4), seed, True, handle)
            for prompt, of, handle, seed in zip(prompts, media, resume, seeds, strict=True)
        ]
        while engine.busy:
            engine.step()
        ended = engine.collect()
        return [ended[number] for number in numbers]

    found = {}
    for keeps in (True, False):
        engine = HFEngine(model, [], 0, 4, sampled_ids=SAMPLED)
        with engine.with_weights(WholeWeights(model)):
            (one, text) = finish(
                engine, [first, [7, 8, 9]], [tuple(items[:1]), ()], [None, None], [1, 2]
            )
            longer = [*first, *one.token_ids, *with_images([OPEN, 4, 9, OPEN, 3, 3, 3], items[1:])]
            turns = [
                longer,
                [*first, *one.token_ids, 8],
                [7, 8, 9, *text.token_ids, *with_images([OPEN], items[:1])],
            ]
            media = [tuple(items), tuple(items[:1]), tuple(items[:1])]
            handles = [one.parked, one.parked, text.parked] if keeps else [None] * 3
            before = engine.reused_tokens
            found[keeps] = finish(engine, turns, media, handles, [3, 4, 5])
            assert (engine.reused_tokens > before) == keeps
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_the_gradient_does_not_depend_on_micro_batches(family, model):
    prompts, media = prompts_of(family, 3, 1, 0)
    rows = [[*prompt, 7, 8, 9] for prompt in prompts]
    gradients = []
    for batches in ([[0, 1, 2]], [[2], [0], [1]], [[1, 2], [0]]):
        actor = Actor(copy.deepcopy(model))
        for batch in batches:
            inputs = ModelInputs.of_ids([rows[i] for i in batch], pad_token_id=0)
            actor(inputs.with_media([media[i] for i in batch])).sum().backward()
        gradients.append([p.grad for p in actor.parameters() if p.grad is not None])
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_values_come_from_the_images_of_the_row(family, model):
    torch.manual_seed(4)
    kind, config = classifier_of(model.config)
    classifier = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    critic = ScalarHeadModel(connected(classifier), "critic").eval()
    prompts, media = prompts_of(family, 1, 3)
    inputs = ModelInputs.of_ids([[*prompt, 7, 8, 9] for prompt in prompts], pad_token_id=0)
    inputs = inputs.with_media(media)
    values = critic(inputs)
    alone = critic(next(inputs.rows()))
    torch.testing.assert_close(values[:1, : alone.shape[1]], alone, atol=1e-5, rtol=1e-4)
    other = critic(inputs.with_media([(random_image(family, 90),), media[1]]))
    assert (other[0] - values[0]).abs().max() > 1e-3
    torch.testing.assert_close(other[1], values[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [ON_CPU, BY_LENGTHS])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_prompt_with_images_is_computed_once_for_a_group(family, model, name, monkeypatch):
    (prompt, _), (items, _) = prompts_of(family, 3, 0)
    prompt = [*[5, 6, 7, 8] * 5, *prompt]
    rows, media = [[*prompt, 7, 8, k] for k in range(4)], [items] * 4
    rows.append(rows[0])  # the same ids, and another first image
    media.append((random_image(family, 80), *items[1:]))
    inputs = ModelInputs.of_ids(rows, pad_token_id=0).with_media(media)
    actor = Actor(model)
    separate = actor(inputs)
    monkeypatch.setattr(attention, "varlen_attn", VarlenLoop())
    model.set_attn_implementation({"": name, "text_config": name})
    share_where_exact(actor, actor, CPU, "actor")
    tokens = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: tokens.append(ids[0].numel())
    )
    shared = actor(inputs)
    hook.remove()
    torch.testing.assert_close(shared, separate, atol=1e-4, rtol=1e-4)
    assert actor.shares_prompts
    assert tokens[0] == len(prompt) + 2 + 4 + len(rows[4]) - 21, (
        "7 and 8 are shared too, and what comes before images"
    )


def test_rows_with_equal_ids_and_other_images_begin_differently():
    one, other = (MediaItem({}, IMAGE, 2, key) for key in (1, 2))
    ids = [5, IMAGE, IMAGE, 6, IMAGE, IMAGE]
    assert distinct_ids(TokenIds(ids, (one, other))) == [5, -2, -2, 6, -3, -3]
    orders = (one, other), (other, one)
    rows = [distinct_ids(TokenIds(ids * 5, order * 5)) for order in orders]
    assert len(prefix_tree(rows, 30).tokens) == 60
    assert distinct_ids(TokenIds([5, IMAGE])) == [5, IMAGE]
    film = MediaItem({}, VIDEO, 2, 3, "video")
    assert distinct_ids(TokenIds([VIDEO, IMAGE, IMAGE, VIDEO], (film, one))) == [-4, -2, -2, -4]


def test_a_batch_without_images_runs_the_tower_for_a_stand_in(family, model):
    (prompt, text), (items, _) = prompts_of(family, 1, 0)
    inputs = ModelInputs.of_ids([[*text, 7]], pad_token_id=0)
    actor = Actor(model)
    expected = actor(inputs)
    actor.use_stand_in(Prompt("", prompt, media=items))
    found = actor(inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    found.sum().backward()
    assert all(p.grad is not None for name, p in actor.named_parameters() if "patch_embed" in name)
    actor.use_stand_in(None)
    expected.sum().backward()  # adds the same again: the stand-in's own gradient is zero
    assert all(
        p.grad.abs().max() == 0 for name, p in actor.named_parameters() if "patch_embed" in name
    )


def test_a_batch_that_lacks_a_kind_gets_the_row_that_has_all():
    image, film = MediaItem({}, IMAGE, 1, 1), MediaItem({}, VIDEO, 1, 2, "video")
    both = Prompt("", [IMAGE, VIDEO], media=(image, film))
    for media, n_rows in (((image,), 2), ((image, film), 1), ((), 2)):
        inputs = ModelInputs.of_ids([[5, IMAGE, 7]], pad_token_id=0).with_media([media])
        whole = with_stand_in(both, inputs)
        assert (len(whole), len(whole.media)) == (n_rows, n_rows)
        assert whole.media[0] == media
        mask = extended_mask(inputs.attention_mask, whole)
        assert mask.shape == whole.sequences.shape and mask[1:].sum() == 0


def test_a_forward_over_the_end_of_a_prompt_cuts_no_image():
    one, other = MediaItem({}, IMAGE, 2, 1), MediaItem({}, IMAGE, 2, 2)
    prompt = TokenIds([5, IMAGE, IMAGE, 6, IMAGE, IMAGE, 7, 8], (one, other))  # 8 tokens
    prompt = TokenIds(distinct_ids(prompt), prompt.media)
    model = FAMILIES["llava"]()
    widths = {width: whole_images(model, [prompt], width) for width in range(1, 9)}
    assert widths == {1: 1, 2: 2, 3: 4, 4: 4, 5: 5, 6: 7, 7: 7, 8: 8}
    both_ways = FAMILIES["gemma3"]()
    assert [whole_images(both_ways, [prompt], width) for width in (2, 3, 5)] == [2, 8, 8]


@pytest.mark.parametrize(("tower", "connector"), [(True, False), (True, True), (False, False)])
def test_what_reads_images_is_frozen_as_asked(family, model, tower, connector):
    freeze_vision(model, tower, connector)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    parts = {name.split(".")[1] for name in trained}
    assert any("layers" in name and "mlp" in name and "vis" not in name for name in trained)
    assert (parts & {"vision_tower", "vision_model"} == set()) == (
        tower or family.startswith("qwen")
    )
    maps = [
        n
        for n, _ in model.named_parameters()
        if "merger" in n or "projector" in n or "connector" in n
    ]
    assert maps and all((name in trained) == (not connector) for name in maps)


def test_adapters_are_on_the_language_model_alone(family, model):
    actor = Actor(model, lora_rank=2)
    adapted = [name for name, p in actor.named_parameters() if p.requires_grad]
    assert adapted and not any(
        part in name for name in adapted for part in ("vision", "visual", "projector", "connector")
    )


def test_images_of_other_sizes_are_padded_to_the_largest():
    items = [MediaItem({"pixel_values": torch.ones(1, 3, n, 4)}, IMAGE, 1, n) for n in (2, 3)]
    made = joined(items)["pixel_values"]
    assert (
        made.shape == (2, 3, 3, 4) and made[0, :, 2].abs().max() == 0 and made[0, :, :2].min() == 1
    )
