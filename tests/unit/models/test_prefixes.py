"""What rows begin with is computed once: the same numbers as of separate rows, with fewer tokens."""

import copy
import logging
import random

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from openppo.experience import ReplayBuffer
from openppo.models import Actor, attention, prefix_batches
from openppo.models.attention import BY_LENGTHS, use_fast_attention
from openppo.models.batching import MicroBatchSize, split_overhead
from openppo.models.equal_batches import equal_batches
from openppo.models.prefix_batches import shared_order, shared_plan
from openppo.models.prefixes import prefix_tree, share_where_exact, text_ids
from openppo.models.scalar_head import ScalarHeadModel
from openppo.models.tree_attention import tree_attention
from openppo.types import Experience, ModelInputs, SingleProcess
from tests.varlen import VarlenLoop

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
COMMON = {"vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.2, "num_labels": 1}
LATER = {"max_window_layers": 1}
ONE_GROUP = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
SHARING = {
    "llama": LlamaConfig(**COMMON, **SIZES, num_key_value_heads=2),
    "qwen2": Qwen2Config(**COMMON, **SIZES, num_key_value_heads=1),
    "qwen3": Qwen3Config(**COMMON, **SIZES, num_key_value_heads=2, head_dim=16),
    "gpt2": GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": GPTNeoXConfig(**COMMON, **SIZES),
    "phi": PhiConfig(**COMMON, **SIZES),
    "mixtral": MixtralConfig(**COMMON, **SIZES, num_key_value_heads=2, num_local_experts=2),
}
SEPARATE = {
    "sliding window": MistralConfig(**COMMON, **SIZES, num_key_value_heads=1, sliding_window=30),
    "alibi": BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4),
    "windows of the mask": Qwen2MoeConfig(
        **COMMON, **SIZES, use_sliding_window=True, sliding_window=64, **LATER
    ),
    "chunks of the mask": Llama4TextConfig(
        **COMMON, **SIZES, num_key_value_heads=2, attention_chunk_size=64
    ),
    "latent attention": DeepseekV3Config(
        **COMMON, **SIZES, q_lora_rank=8, kv_lora_rank=8, **ONE_GROUP
    ),
}
rng = random.Random(7)


def tokens(n):
    return [rng.randrange(1, 40) for _ in range(n)]


def groups_of(n_groups, size, prompt=24, longest=9):
    """Rows of prompts with several responses of unequal length, shuffled; of one group every second is a branch."""
    rows = []
    for number in range(n_groups):
        begin = tokens(prompt + number)
        branch = [*begin, *tokens(17)]
        rows += [
            [*(branch if number == 1 and i % 2 else begin), *tokens(rng.randint(1, longest))]
            for i in range(size)
        ]
    rng.shuffle(rows)
    return rows


ROWS = groups_of(3, 4)


def model_of(config, dtype=torch.float32, auto=AutoModelForCausalLM, implementation=None):
    torch.manual_seed(5)
    model = auto.from_config(copy.deepcopy(config)).to(dtype)
    use_fast_attention(model)
    if implementation:
        model.set_attn_implementation(implementation)
    return model


@pytest.fixture
def from_one_token(monkeypatch):
    """Beginnings of any length are shared."""
    monkeypatch.setattr(prefix_batches, "LEAST_SHARED", 1)


def test_a_tree_has_each_beginning_once_and_splits_where_rows_part(from_one_token):
    rows = [[1, 2, 3, 4], [1, 2, 5], [7], [1, 2, 3, 6, 8], [1, 2, 3, 4]]
    tree = prefix_tree(rows, width=5)
    flat = [token for row in rows for token in [*row, *[0] * (5 - len(row))]]
    assert [flat[place] for place in tree.tokens] == [1, 2, 3, 4, 6, 8, 5, 7]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 4, 2, 0]
    #              1 2      3        4        6 8      5        7
    assert tree.nodes.tolist() == [[0, 2, 7], [2, 3, 6], [3, 4, 4], [4, 6, 6], [6, 7, 7], [7, 8, 8]]
    assert (
        tree.in_row.view(5, 5)[0, :4].tolist()
        == tree.in_row.view(5, 5)[4, :4].tolist()
        == [0, 1, 2, 3]
    )
    assert tree.in_row.view(5, 5)[1, :3].tolist() == [0, 1, 6]


def seen_by(tree, rows, width):
    """Which tokens of the tree each one may see: those before it in any row that it is in."""
    seen = torch.zeros(len(tree.depths), len(tree.depths), dtype=torch.bool)
    for places, row in zip(tree.in_row.view(len(rows), width).tolist(), rows, strict=True):
        for t in range(len(row)):
            seen[places[t], places[: t + 1]] = True
    return seen


def random_rows():
    """Of few different tokens, so that they begin alike in many ways; some twice, some the beginning of others."""
    rows = [[rng.randrange(2) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 9))]
    return [*rows, list(rows[0]), rows[-1][: rng.randint(1, 9)]]


def test_attention_of_a_tree_is_that_of_separate_rows_with_its_gradient(from_one_token):
    for _ in range(30):
        rows = random_rows()
        width = max(map(len, rows))
        tree = prefix_tree(rows, width)
        assert [
            row[tree.depths[p]]
            for row, places in zip(rows, tree.in_row.view(-1, width), strict=True)
            for p in places[: len(row)]
        ] == [t for row in rows for t in row]
        inputs = [
            torch.randn(1, heads, len(tree.depths), 8, requires_grad=True) for heads in (4, 2, 2)
        ]
        doubles, how = [x.double() for x in inputs], {"scale": 0.3, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(
            *doubles, attn_mask=seen_by(tree, rows, width), **how
        )
        found = tree_attention(*inputs, tree.nodes, 0.3)[0]
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
        upstream = torch.randn_like(found)
        gradients = (
            torch.autograd.grad(found, inputs, upstream),
            torch.autograd.grad(expected, inputs, upstream.double()),
        )
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_keeps_torchs_rules(dtype):
    nodes = prefix_tree(ROWS, 60).nodes
    shapes = [(1, heads, int(nodes[-1, 1]) + 3, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    torch.library.opcheck(tree_attention, (*inputs, nodes, 0.3))
    assert not tree_attention(*inputs, nodes, 0.3)[0][:, :, -3:].any(), "of what is in no node"


class Tokens:
    """How many of them the embedding of a model has seen, forward by forward."""

    def __init__(self, model):
        self.counts = []
        model.get_input_embeddings().register_forward_hook(
            lambda _, given, __: self.counts.append(given[0].numel())
        )


def actor_outputs(actor, rows, first_action=20):
    inputs = ModelInputs.of_ids(rows, pad_token_id=0)
    actions = inputs.attention_mask.clone()
    actions[:, :first_action] = False
    actor.zero_grad()
    outputs = actor(inputs, actions, return_entropy=True)
    torch.manual_seed(1)
    sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
    gradient = torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])
    return [output.detach() for output in outputs], gradient


@pytest.mark.parametrize("name", SHARING)
def test_log_probs_entropy_and_gradient_are_those_of_separate_rows(name):
    actor = Actor(model_of(SHARING[name]), temperature=1.3)
    share_where_exact(actor, actor, CPU, "actor")
    assert actor.shares_prompts
    seen = Tokens(actor.model)
    ours, gradient = actor_outputs(actor, ROWS)
    actor.use_sharing(False)
    theirs, expected = actor_outputs(actor, ROWS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    once = sum(map(len, ROWS)) - sum(shared_order(ROWS)[1])
    assert seen.counts == [once, len(ROWS) * max(map(len, ROWS))]


@pytest.mark.parametrize("name", SEPARATE)
def test_other_attention_reads_separate_rows_and_says_so(name, caplog):
    actor = Actor(model_of(SEPARATE[name]))
    with caplog.at_level(logging.INFO, "openppo"):
        share_where_exact(actor, actor, CPU, "actor")
    assert not actor.shares_prompts
    assert caplog.text.count("prompts of the actor are computed for each response") == 1


def test_values_are_those_of_separate_rows():
    critic = ScalarHeadModel(
        model_of(SHARING["llama"], auto=AutoModelForSequenceClassification), "critic"
    )
    share_where_exact(critic, critic, CPU, "critic")
    assert critic.shares_prompts
    inputs = ModelInputs.of_ids(ROWS, pad_token_id=0)
    found, mask = critic(inputs), inputs.attention_mask
    critic.use_sharing(False)
    torch.testing.assert_close(found[mask], critic(inputs)[mask], rtol=1e-4, atol=1e-5)


def test_bfloat16_differs_by_its_rounding_only():
    actor = Actor(model_of(SHARING["llama"], torch.bfloat16))
    share_where_exact(actor, actor, CPU, "actor")
    assert actor.shares_prompts
    ours, gradient = actor_outputs(actor, ROWS)
    actor.use_sharing(False)
    theirs, expected = actor_outputs(actor, ROWS)
    exact, _ = actor_outputs(Actor(model_of(SHARING["llama"])), ROWS)
    bound = 2 * float((theirs[0] - exact[0]).abs().max())
    assert float((ours[0] - exact[0]).abs().max()) < bound
    assert (gradient - expected).norm() < 0.05 * expected.norm()


def test_trial_rows_hold_text_from_the_whole_vocabulary():
    config = model_of(SHARING["llama"]).config
    config.vocab_size = 50_000
    config.image_token_id = text_ids(config, 48)[0]
    ids = text_ids(config, 48)
    assert len(ids) == 48 and config.image_token_id not in ids
    assert max(ids) > 40_000, "first ids are special tokens, at which real models amplify rounding"


def test_by_lengths_each_node_sees_the_keys_of_its_path(monkeypatch):
    loop = VarlenLoop()
    monkeypatch.setattr(attention, "varlen_attn", loop)
    actor = Actor(model_of(SHARING["llama"], implementation=BY_LENGTHS), temperature=1.3)
    share_where_exact(actor, actor, CPU, "actor")
    assert actor.shares_prompts
    loop.calls.clear()
    ours, gradient = actor_outputs(actor, ROWS)
    once = sum(map(len, ROWS)) - sum(shared_order(ROWS)[1])
    assert [int(call.starts[-1]) for call in loop.calls] == [once] * 2
    theirs, expected = actor_outputs(Actor(model_of(SHARING["llama"]), temperature=1.3), ROWS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


def test_a_model_that_loses_the_tree_on_its_way_reads_separate_rows(monkeypatch, caplog):
    monkeypatch.setattr("openppo.models.prefixes.PREFIX_TREE", "lost")
    actor = Actor(model_of(SHARING["llama"]))
    share_where_exact(actor, actor, CPU, "actor")
    assert not actor.shares_prompts and "change each other's outputs" in caplog.text


def test_a_model_that_counts_positions_itself_reads_separate_rows(monkeypatch):
    actor = Actor(model_of(SHARING["gpt2"]))
    forward = actor.model.forward
    monkeypatch.setattr(
        actor.model, "forward", lambda *args, position_ids=None, **more: forward(*args, **more)
    )
    share_where_exact(actor, actor, CPU, "actor")
    assert not actor.shares_prompts


def test_other_attention_is_not_tried(caplog):
    actor = Actor(model_of(SHARING["llama"], implementation="eager"))
    with caplog.at_level(logging.INFO, "openppo"):
        share_where_exact(actor, actor, CPU, "actor")
    assert not actor.shares_prompts and "its attention is eager" in caplog.text


def test_rows_that_share_little_are_not_shared():
    actor = Actor(model_of(SHARING["llama"]))
    actor.use_sharing(True)
    seen, rows = Tokens(actor.model), [tokens(40) for _ in range(4)]
    actor_outputs(actor, rows)
    actor_outputs(actor, [*rows, [*rows[0][:16], *tokens(24)]])
    assert seen.counts == [4 * 40, 5 * 40]


def test_a_training_step_reads_a_prompt_once_for_each_group():
    actor, rows = Actor(model_of(SHARING["llama"])), groups_of(4, 4, prompt=30)
    actor.use_sharing(True)
    buffer = ReplayBuffer(shares_prompts=True)
    for row in rows:
        inputs = ModelInputs.of_ids([row], pad_token_id=0)
        actions = inputs.attention_mask & (torch.arange(len(row)) >= 30)
        given = {"truncated": torch.tensor([False]), "rollout_log_probs": actions.float()}
        buffer.append(Experience(inputs, action_mask=actions, **given))
    seen = Tokens(actor.model)
    [step] = buffer.mini_batches(batch_size=16, micro_batch_size=4, epochs=1, seed=3)
    for micro in step.micro_batches:
        actor(micro.inputs, micro.action_mask)
    assert len(seen.counts) == 4
    assert sum(seen.counts) == sum(map(len, rows)) - sum(shared_order(rows)[1])


def computed(rows, share):
    """Tokens of a share's micro-batches."""
    return sum(
        len({tuple(rows[i][: t + 1]) for i in batch for t in range(len(rows[i]))})
        for batch in share
    )


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_a_plan_keeps_groups_whole_where_no_rank_gets_fuller(n_ranks):
    rows = [[*row, *tokens(33 - len(row))] for row in groups_of(6, 4, prompt=24, longest=1)]
    plan = shared_plan(rows, n_ranks, MicroBatchSize(4))
    assert sorted(i for share in plan for batch in share for i in batch) == [*range(24)]
    assert [len(batch) for share in plan for batch in share] == [4] * 6
    assert all(len({tuple(rows[i][:20]) for i in batch}) == 1 for share in plan for batch in share)
    one_group = groups_of(1, 8)
    assert [len(share) for share in shared_plan(one_group, 2, MicroBatchSize(8))] == [1, 1], (
        "both ranks have half"
    )


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_a_header_common_to_all_leaves_ranks_equal(n_ranks):
    header = tokens(20)
    rows = [[*header, *row] for row in groups_of(16, 8, prompt=60)]
    loads = [computed(rows, share) for share in shared_plan(rows, n_ranks, MicroBatchSize(8))]
    assert max(loads) < 1.15 * computed(rows, [[*range(len(rows))]]) / n_ranks + 16 / n_ranks * 20


def test_a_budget_counts_all_tokens_of_its_rows_whatever_of_them_is_shared():
    """Logits and copies of keys are as many."""
    rows = [[*begin, *tokens(10)] for begin in (tokens(30), tokens(30)) for _ in range(5)]
    [plan] = shared_plan(rows, 1, MicroBatchSize(1, tokens=130))
    assert [sum(len(rows[i]) for i in batch) for batch in plan] == [120, 80, 120, 80]
    unequal = [tokens(900) + tokens(50)] * 8 + [tokens(1000)] + [tokens(20) for _ in range(100)]
    actor = Actor(model_of(SHARING["llama"]))
    actor.use_sharing(True)
    seen = Tokens(actor.model)
    for batch in shared_plan(unequal, 1, MicroBatchSize(1, tokens=3000))[0]:
        actor(ModelInputs.of_ids([unequal[i] for i in batch], pad_token_id=0))
    assert max(seen.counts) <= 3000, "no row is padded where that is more"


def test_fewer_passes_count_under_zero_3():
    """Whole groups on one rank would be fewer tokens, but three passes on it."""
    groups = [[[1, number, *tokens(78)], range(8)] for number in (1, 2)]
    rows = [[*begin, *tokens(4)] for begin, members in groups for _ in members] + [
        [39, *tokens(109)] for _ in range(4)
    ]
    assert [
        len(share) for share in shared_plan(rows, 2, MicroBatchSize(8, overhead=split_overhead(3)))
    ] == [2, 2]


def test_plans_that_save_nothing_are_none():
    assert shared_plan([tokens(20) for _ in range(6)], 2, MicroBatchSize(2)) is None
    assert shared_plan([], 2, MicroBatchSize(2)) is None
    apart = [tokens(20) for _ in range(5)]
    assert equal_batches([20] * 5, MicroBatchSize(2), SingleProcess(), apart) == [
        [0, 1],
        [2, 3],
        [4],
    ]
    rows = [*groups_of(2, 2), [*tokens(9)]]
    batches = equal_batches([*map(len, rows[:4]), 0], MicroBatchSize(2), SingleProcess(), rows)
    assert [len({tuple(rows[i][:24]) for i in batch}) for batch in batches] == [1, 1]
