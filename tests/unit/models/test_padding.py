"""Batches of similar length with as little padding as any, and padding on CPUs in bfloat16 that changes no result."""

import itertools
import math
import random

import pytest
import torch
from transformers import LlamaForSequenceClassification

from openppo.models import Actor, ScalarHeadModel
from openppo.models.batching import MicroBatchSize, micro_batches, split_overhead
from openppo.models.dealing import Deal, deal
from openppo.models.padding import rounded_width
from openppo.models.scalar_head import ProcessRewardModel
from openppo.types import ModelInputs
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (4, None, [[1, 4, 0], [2, 3, 5]]),
        (1, None, [[1], [4], [0], [2], [3], [5]]),
        (1, 14, [[1], [4], [0], [2, 3, 5]]),
        (4, 3, [[1], [4], [0], [2], [3], [5]]),  # none is left out
    ],
)
def test_micro_batches_hold_neighbours_in_length_and_no_more_than_fit(rows, tokens, expected):
    assert micro_batches([5, 9, 2, 2, 7, 1], MicroBatchSize(rows, tokens)) == expected
    assert micro_batches([], MicroBatchSize(rows, tokens)) == []
    assert micro_batches([6, 6, 6], MicroBatchSize(rows=2)) == [[0, 1], [2]], "full ones first"


def every_cut(n):
    """All ways to cut ``n`` sequences into neighbouring batches, by their sizes."""
    for signs in itertools.product((False, True), repeat=n - 1):
        bounds = [0, *(place for place, cut in enumerate(signs, start=1) if cut), n]
        yield [end - start for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("tokens", [None, 40])
def test_no_other_cut_costs_less_in_padding_and_batches(tokens):
    def cost(sizes, ordered, rows):
        places = itertools.accumulate(sizes[:-1], initial=0)
        areas = [n * ordered[place] for n, place in zip(sizes, places, strict=True)]
        fit = [
            n <= rows if tokens is None else n == 1 or area <= tokens
            for n, area in zip(sizes, areas, strict=True)
        ]
        full = rows * ordered[0] if tokens is None else tokens
        return sum(areas) + len(sizes) * full / 8 if all(fit) else math.inf

    rng = random.Random(3)
    for _ in range(50):
        lengths, rows = [round(rng.expovariate(1 / 9)) + 1 for _ in range(8)], rng.randint(1, 8)
        ordered = sorted(lengths, reverse=True)
        found = micro_batches(lengths, MicroBatchSize(rows, tokens))
        assert [lengths[i] for batch in found for i in batch] == ordered
        assert cost([len(b) for b in found], ordered, rows) == min(
            cost(cut, ordered, rows) for cut in every_cut(8)
        )
        under_zero_3 = micro_batches(lengths, MicroBatchSize(rows, overhead=split_overhead(3)))
        assert len(under_zero_3) == -(-8 // rows), "as few as possible"


@pytest.mark.parametrize("n_shares", [1, 2, 3, 8])
def test_shares_differ_by_at_most_one_sequence_and_its_tokens(n_shares):
    rng = random.Random(n_shares)
    for n in range(20):
        lengths = [round(rng.expovariate(1 / 9)) + 1 for _ in range(n)]
        shares = deal(lengths, n_shares)
        tokens, counts = (
            [sum(lengths[i] for i in share) for share in shares],
            [len(share) for share in shares],
        )
        assert sorted(i for share in shares for i in share) == list(range(n)), (
            "each is in one share"
        )
        assert max(counts) - min(counts) <= 1 and max(tokens) - min(tokens) <= max(
            lengths, default=0
        )


@pytest.mark.parametrize(
    ("lengths", "tokens"),  # of the rows of each rank; of its share
    [
        ([[1, 9, 8], [2, 7], []], [9, 9, 9]),
        ([[6], []], [6, 0]),  # one row cannot be shared
        ([[5, 5], [5, 4]], [10, 9]),
        ([[10], [4, 4, 3]], [10, 11]),  # dealing would make it 13 and 8
        ([[9, 1, 5]], [15]),
        ([[], []], [0, 0]),
    ],
)
def test_rows_move_off_full_ranks_only_and_outputs_come_back(lengths, tokens):
    rows = [
        [torch.full((2, n), 10 * rank + i) for i, n in enumerate(own)]
        for rank, own in enumerate(lengths)
    ]

    def work(comm):
        dealt = Deal(lengths[comm.rank], comm)
        share = dealt.out(rows[comm.rank])
        return share, dealt.back([-row.float() for row in share])

    found = on_ranks(len(lengths), work)
    assert [sum(row.shape[1] for row in share) for share, _ in found] == tokens
    moved = sorted(tokens) != sorted(map(sum, lengths))
    for (share, back), own in zip(found, rows, strict=True):
        assert moved or share is own, "nothing is sent"
        assert [row.tolist() for row in back] == [(-row).tolist() for row in own]


@pytest.mark.parametrize(
    (
        "rows",
        "groups",
    ),  # (length, group, prompt) of the rows of each rank; the groups of each rank then
    [
        (
            [[(30, g, 20) for g in (0, 0, 1, 1)], []],
            [{0}, {1}],
        ),  # by rows each would compute both prompts
        ([[(30, g, 20) for g in (0, 0, 0, 1)], [(12, 2, 8)]], [{0}, {1, 2}]),
        (
            [[(30, 0, 4)] * 4, []],
            [{0}, {0}],
        ),  # one group: its prompt twice is less than all on one rank
        (
            [[(n, 0, n - 90) for n in (90, 990, 980, 1000, 90)], [(150, 1, 50)] * 4],
            [{0, 1}, {0, 1}],
        ),  # not shared
    ],
)
def test_groups_move_whole_where_that_costs_no_balance(rows, groups):
    def work(comm):
        mine = rows[comm.rank]
        dealt = Deal([length for length, _, _ in mine], comm, [(group, n) for _, group, n in mine])
        return dealt.out([torch.full((1, length), group) for length, group, _ in mine])

    found = on_ranks(len(rows), work)
    assert sorted(({int(row[0, 0]) for row in share} for share in found), key=min) == groups


def test_few_widths_hold_all_lengths_with_little_padding():
    widths = {length: rounded_width(length) for length in range(1, 4097)}
    assert all(
        width % 8 == 0 and 0 <= width - length <= max(7, length / 16)
        for length, width in widths.items()
    )
    assert len({width for length, width in widths.items() if 128 <= length < 1024}) <= 49


def widths_read(model):
    """Grows by the width of each batch of ids that the model embeds."""
    widths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].shape[1])
    )
    return widths


READ = {
    "log-probs": lambda model, ids, mask: Actor(model)(ModelInputs(ids, mask)),
    "values": lambda model, ids, mask: ScalarHeadModel(model, "critic")(ModelInputs(ids, mask)),
    "scores": lambda model, ids, mask: ScalarHeadModel(model, "reward")(ModelInputs(ids, mask)),
    "steps": lambda model, ids, mask: ProcessRewardModel(model)(
        ModelInputs(ids, mask), mask & ~torch.roll(mask, -1, 1)
    ),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(("length", "width"), [(9, 16), (130, 136), (260, 272)])
def test_results_and_gradients_do_not_depend_on_the_width(llama, read, length, width, monkeypatch):
    ids, mask = (
        torch.randint(1, 40, (3, length)),
        torch.arange(length) < torch.tensor([[length], [5], [7]]),
    )
    results = []
    for expected in (width, length):
        if expected == length:
            monkeypatch.setattr("openppo.models.padding.rounded_width", lambda length: length)
        model = llama(initializer_range=0.02, num_labels=1)
        if read in ("values", "scores"):
            torch.manual_seed(0)
            model = LlamaForSequenceClassification(model.config)
        model = model.bfloat16()
        widths = widths_read(model)
        output = READ[read](model, ids, mask)
        output.float().sum().backward()
        assert widths == [expected]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((output.detach().float(), gradient.float()))
    (mine, my_gradient), (other, other_gradient) = results
    torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)
    assert (my_gradient - other_gradient).norm() <= 0.02 * other_gradient.norm()


def test_nothing_is_added_in_float32_and_beyond_the_models_positions(llama, gpt2):
    for model, lengths, expected in (
        (llama(), [9], [9]),
        (gpt2(n_positions=13).bfloat16(), [7, 9, 13], [8, 9, 13]),
    ):
        widths = widths_read(model)
        for length in lengths:
            Actor(model)(
                ModelInputs(
                    torch.ones(2, length, dtype=torch.int64),
                    torch.ones(2, length, dtype=torch.bool),
                )
            )
        assert widths == expected
