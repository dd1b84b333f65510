"""Rows come apart and together unchanged; the buffer normalizes over everything and deals out every sample once."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openppo.experience import ReplayBuffer
from openppo.experience.replay_buffer import collate, idle_experience, join_rows, split_rows
from openppo.types import Experience, FinishReason, ModelInputs, segments_of
from tests.ranks import on_ranks
from tests.samples import with_last

N = 11
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


def sample(number, length=None):
    """A sample of its own length, known by its score; some have holes, one has no action at all."""
    length = length or 3 + number % 5
    generator = torch.Generator().manual_seed(number)
    mask = torch.tensor([[t > 0 and (t + number) % 4 != 0 and number != 6 for t in range(length)]])
    return Experience(
        ModelInputs(
            torch.randint(0, 9, (1, length), generator=generator),
            torch.ones(1, length, dtype=torch.bool),
        ),
        action_mask=mask,
        rollout_log_probs=torch.zeros(1, length),
        scores=torch.tensor([float(number)]),
        truncated=torch.tensor([number % 2 == 0]),
        advantages=torch.where(mask, torch.randn(1, length, generator=generator) * 3 + 2, 0.0),
    )


SAMPLES = [sample(number) for number in range(N)]


def filled(samples, *comm, **options):
    buffer = ReplayBuffer(*comm, **options)
    buffer.fill(samples)
    return buffer


def rows_of(batch):
    """The samples of one rank's share of a step. An idle row has two tokens, a sample at least three."""
    rows = [(micro, i) for micro in batch.micro_batches for i in range(len(micro))]
    return [
        (int(micro.scores[i]), micro, i) for micro, i in rows if micro.attention_mask[i].sum() > 2
    ]


def names(batch):
    return sorted(number for number, *_ in rows_of(batch))


def steps(buffer, batch_size=4, micro=2, epochs=1, seed=3, **options):
    return list(buffer.mini_batches(batch_size, micro, epochs, seed, **options))


def share(comm):
    """Consecutive samples for each rank, of unequal number."""
    bounds = {1: [0, N], 2: [0, 4, N], 3: [0, 5, 5, N]}[
        comm.world_size
    ]  # of three ranks the second has nothing
    return SAMPLES[bounds[comm.rank] : bounds[comm.rank + 1]]


@WORLDS
@pytest.mark.parametrize("outside", [0.0, torch.nan])
def test_normalization_is_over_the_action_tokens_of_all_ranks(world_size, outside):
    def work(comm):
        buffer = ReplayBuffer(comm, normalizes=True)
        buffer.fill(
            s.with_fields(advantages=torch.where(s.action_mask, s.advantages, outside))
            for s in share(comm)
        )
        return buffer.items

    items = [item for of_rank in on_ranks(world_size, work) for item in of_rank]
    tokens = np.concatenate([s.advantages[s.action_mask].double().numpy() for s in SAMPLES])
    for item, original in zip(items, SAMPLES, strict=True):
        expected = (original.advantages.double().numpy() - tokens.mean()) / np.sqrt(
            tokens.var() + 1e-8
        )
        found = item.with_fields(advantages=original.advantages).tensors()
        np.testing.assert_allclose(
            item.advantages.numpy(), np.where(item.action_mask, expected, 0), rtol=0, atol=1e-6
        )
        assert item.advantages.dtype == torch.float32
        assert all(torch.equal(found[name], tensor) for name, tensor in original.tensors().items())


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([7.0] * 4, [0.0] * 4),
        (
            [1e6 + k for k in range(4)],
            [-1.3416407865, -0.4472135955, 0.4472135955, 1.3416407865],
        ),  # keeps its digits
        ([], []),
    ],
)
def test_normalization_by_hand_and_without_any_action(numbers, expected):
    mask = torch.ones(1, len(numbers), dtype=torch.bool)
    buffers = (
        filled([sample(1).with_fields(action_mask=mask, advantages=torch.tensor([numbers]))]),
        ReplayBuffer(),
    )
    for buffer in buffers:
        buffer.normalize("advantages")
    assert buffers[0].items[0].advantages[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_batch_enters_as_single_samples():
    buffer = filled(SAMPLES[-1:])
    assert len(filled(SAMPLES)) == N
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    scores, ids = torch.tensor([1.0, 2.0]), torch.tensor([[4, 5, 0], [6, 7, 8]])
    buffer.append(
        Experience(
            ModelInputs(ids, mask),
            mask,
            torch.zeros(2, 3),
            torch.tensor([True, False]),
            scores=scores,
        )
    )
    assert [item.sequences.tolist() for item in buffer.items[1:]] == [
        [[4, 5]],
        [[6, 7, 8]],
    ]  # without padding
    assert [item.scores.tolist() for item in buffer.items] == [[10.0], [1.0], [2.0]]
    buffer.clear()
    assert (len(buffer), steps(buffer)) == (0, [])


def test_samples_move_to_the_cpu(monkeypatch):
    moved: list[str] = []
    monkeypatch.setattr(Experience, "to", lambda self, device: moved.append(device) or self)
    filled(SAMPLES[:2])
    assert moved == ["cpu", "cpu"]


def assert_unchanged(number, micro, i):
    """The row has what was put in, and padding of 0."""
    original = SAMPLES[number]
    for name, tensor in original.tensors().items():
        found, length = micro.tensors()[name][i], original.sequences.shape[1]
        assert torch.equal(
            found[:length] if found.dim() else found[None], tensor.squeeze(0).view(-1)
        ), name
        assert not found.dim() or not found[length:].any()


@WORLDS
@pytest.mark.parametrize(
    ("batch_size", "micro", "budget"),
    [(4, 2, None), (3, 1, None), (100, 100, None), (1, 1, None), (N, 1, 14)],
)
def test_every_sample_is_used_once_per_epoch_in_the_same_steps_for_any_number_of_ranks(
    world_size, batch_size, micro, budget
):
    def work(comm):
        return steps(filled(share(comm), comm), batch_size, micro, epochs=2, micro_tokens=budget)

    of_steps = list(zip(*on_ranks(world_size, work), strict=True))
    used = [sorted(number for batch in of_step for number in names(batch)) for of_step in of_steps]
    per_epoch = -(-N // batch_size)
    assert used == [names(batch) for batch in steps(filled(SAMPLES), batch_size, micro, epochs=2)]
    for epoch in (used[:per_epoch], used[per_epoch:]):
        assert sorted(itertools.chain(*epoch)) == list(range(N))
    for of_step, numbers in zip(of_steps, used, strict=True):
        assert len({len(batch.micro_batches) for batch in of_step}) == 1, "equally many forwards"
        parts = [part for batch in of_step for part in batch.micro_batches]
        assert all(
            len(part) <= micro if budget is None else part.sequences.numel() <= budget
            for part in parts
        )
        assert budget is None or sum(len(part) > 1 for part in parts) > 1
        shares = [names(batch) for batch in of_step]
        lengths = [
            sum(SAMPLES[number].sequences.shape[1] for number in of_rank) for of_rank in shares
        ]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(lengths) - min(lengths) <= 7, "tokens, up to the longest sample"
        n_tokens = sum(int(SAMPLES[number].action_mask.sum()) for number in numbers)
        assert [batch.n_tokens for batch in of_step] == [n_tokens] * world_size, "of the whole step"
        for batch in of_step:
            assert names(batch) or not any(
                part.action_mask.any() for part in batch.micro_batches
            ), "idle"
            for row in rows_of(batch):
                assert_unchanged(*row)


def test_each_epoch_has_its_own_order_and_a_seed_repeats_them_all():
    def orders(seed):
        flat = [
            names(batch)[0]
            for batch in steps(filled(SAMPLES), batch_size=1, micro=1, epochs=3, seed=seed)
        ]
        return [flat[start : start + N] for start in range(0, 3 * N, N)]

    first, second, third = orders(3)
    assert first != second != third != first
    assert first != list(range(N))
    assert orders(3) == [first, second, third]
    assert orders(4)[0] != first


def test_idle_micro_batches_share_no_memory_as_safetensors_demands():
    step = {i: sample(i, length) for i, length in enumerate((10, 12, 3, 9, 16))}
    shares = [
        ReplayBuffer(SimpleNamespace(rank=r, world_size=2))._share(step, 8, 32) for r in range(2)
    ]
    rows = [[micro.sequences for micro in batch.micro_batches] for batch in shares]
    assert sorted(sum(row.shape[1] == 2 for row in of_rank) for of_rank in rows) == [0, 2]
    assert all(len({row.data_ptr() for row in of_rank}) == len(of_rank) for of_rank in rows)


END = 2  # end of sequence, and what padding is filled with


@pytest.fixture
def batch(make_sample):
    last = make_sample([END, 8], [9, 3, 3, END, 4], [1, 0, 0, 1, 1], FinishReason.LENGTH)
    log_probs = last.last.log_probs.copy()
    log_probs[3] = -7.0  # written by an environment: left out
    samples = [
        make_sample([5, END, 6], [7, END], help=1.5),
        make_sample([END], [END], help=2.0),
        with_last(last, log_probs=log_probs),
    ]
    return collate(samples, END).with_fields(scores=torch.tensor([1.25, 2.0, 0.0]))


def test_fields_by_hand_though_pad_and_end_of_sequence_are_the_same_id(batch):
    real = [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7]
    ids = [[5, 2, 6, 7, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2], [2, 8, 9, 3, 3, 2, 4]]
    assert (batch.attention_mask.tolist(), batch.sequences.tolist()) == (real, ids)
    found = {name: tensor.tolist() for name, tensor in batch.tensors().items()}
    assert found == {
        "action_mask": [[0, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1, 1]],
        "rollout_log_probs": [
            [0, 0, 0, -0.875, -1, 0, 0],
            [0, -0.625, *[0] * 5],
            [0, 0, -0.75, 0, 0, -1.125, -1.25],
        ],
        "truncated": [False, False, True],
        "weight": [1.0] * 3,
        "fraction": [1.0] * 3,
        "scores": [1.25, 2.0, 0.0],
    }
    dtypes = {"sequences": torch.int64} | dict.fromkeys(
        ("attention_mask", "action_mask", "truncated"), torch.bool
    )
    assert all(
        tensor.dtype == dtypes.get(name, torch.float32) for name, tensor in batch.tensors().items()
    )


def test_each_segment_of_a_sample_is_a_row_with_its_fraction_of_the_actions(make_sample):
    first = make_sample([5], [7, 6, END], reason=FinishReason.LENGTH)
    second = make_sample([5, 7], [END])
    sample = replace(first, segments=segments_of([first, second]), weight=0.5)
    batch = collate([sample, second], END)
    assert batch.sequences.tolist() == [[5, 7, 6, END], [5, 7, END, END], [5, 7, END, END]]
    assert batch.attention_mask.sum(-1).tolist() == [4, 3, 3]
    assert batch.truncated.tolist() == [True, False, False]
    assert batch.weight.tolist() == [0.5, 0.5, 1.0]
    assert batch.fraction.tolist() == [0.75, 0.25, 1.0]


def test_rows_apart_have_no_padding_and_together_are_the_same_batch(batch):
    whole = batch.with_fields(values=torch.where(batch.action_mask, torch.randn(3, 7), 0.0))
    first, second, third = split_rows(whole)
    assert [row.sequences.tolist() for row in (first, second)] == [[[5, 2, 6, 7, 2]], [[2, 2]]]
    assert (second.rollout_log_probs.tolist(), second.scores.tolist()) == ([[0.0, -0.625]], [2.0])
    assert first.sequences.untyped_storage().nbytes() == 5 * 8, "no row keeps the batch in memory"
    again = join_rows([join_rows([first, second]), third])
    assert again.tensors().keys() == whole.tensors().keys()
    assert again.inputs.distinct_rows == whole.inputs.distinct_rows
    for name, tensor in whole.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name


def test_an_idle_row_has_every_field_and_no_action():
    idle = idle_experience()
    assert {*idle.tensors(), "inputs"} == set(Experience.__dataclass_fields__)
    assert (len(idle), idle.action_mask.any().item(), idle.attention_mask.all().item()) == (
        1,
        False,
        True,
    )
    assert join_rows([idle, idle]).sequences.shape == (2, 2)
