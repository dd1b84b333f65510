"""The replay buffer normalizes over everything and deals out every sample once, however many ranks there are."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from openppo.experience import ReplayBuffer
from openppo.experience.replay_buffer import MiniBatch
from openppo.types import Experience

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
N = 11


def sample(number: int) -> Experience:
    """A sample of its own length, known by its score; some have holes, one has no action at all."""
    length = 3 + number % 5
    generator = torch.Generator().manual_seed(number)
    actions = [t > 0 and (t + number) % 4 != 0 and number != 6 for t in range(length)]
    mask = torch.tensor([actions])
    return Experience(
        sequences=torch.randint(0, 9, (1, length), generator=generator),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        action_mask=mask,
        rollout_log_probs=torch.zeros(1, length),
        scores=torch.tensor([float(number)]),
        truncated=torch.tensor([number % 2 == 0]),
        advantages=torch.where(mask, torch.randn(1, length, generator=generator) * 3 + 2, 0.0),
    )


SAMPLES = [sample(number) for number in range(N)]


def filled(samples: list[Experience], comm: Any = None, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(comm, **options)
    buffer.extend(samples)
    return buffer


def names(batch: MiniBatch) -> list[int]:
    """The samples of one rank's share of a step. An idle row has two tokens, a sample at least three."""
    rows = [(micro, i) for micro in batch.micro_batches for i in range(len(micro))]
    real = [(micro, i) for micro, i in rows if micro.attention_mask[i].sum() > 2]
    return sorted(int(micro.scores[i]) for micro, i in real)


def steps(buffer: ReplayBuffer, batch_size: int = 4, micro: int = 2, epochs: int = 1, seed: int = 3) -> list[MiniBatch]:
    return list(buffer.mini_batches(batch_size, micro, epochs, seed))


def shares(world_size: int) -> list[list[Experience]]:
    """Consecutive samples for each rank, of unequal number."""
    bounds = {1: [0, N], 2: [0, 4, N], 3: [0, 5, 5, N]}[world_size]  # of three ranks the second has nothing
    return [SAMPLES[bounds[rank] : bounds[rank + 1]] for rank in range(world_size)]


def normalized_by_numpy() -> list[np.ndarray]:
    tokens = np.concatenate([s.advantages[s.action_mask].double().numpy() for s in SAMPLES])
    mean, std = tokens.mean(), np.sqrt(tokens.var() + 1e-8)
    return [np.where(s.action_mask, (s.advantages.double().numpy() - mean) / std, 0.0) for s in SAMPLES]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_normalization_is_over_the_action_tokens_of_all_samples_on_all_ranks(
    world_size: int, on_ranks: OnRanks
) -> None:
    def work(comm: Any) -> list[Experience]:
        buffer = filled(shares(world_size)[comm.rank], comm)
        buffer.normalize("advantages")
        return buffer.items

    items = [item for of_rank in on_ranks(world_size, work) for item in of_rank]
    assert len(items) == N
    for item, expected in zip(items, normalized_by_numpy(), strict=True):
        assert item.advantages.dtype == torch.float32
        np.testing.assert_allclose(item.advantages.numpy(), expected, rtol=0, atol=1e-6)


def test_numbers_outside_the_mask_do_not_disturb_normalization() -> None:
    strange = [s.with_fields(advantages=torch.where(s.action_mask, s.advantages, torch.nan)) for s in SAMPLES]
    buffer = filled(strange)
    buffer.normalize("advantages")
    for item, expected in zip(buffer.items, normalized_by_numpy(), strict=True):
        np.testing.assert_allclose(item.advantages.numpy(), expected, rtol=0, atol=1e-6)


def test_equal_advantages_become_zero_and_a_large_offset_keeps_its_digits() -> None:
    def normalized(numbers: list[float]) -> list[float]:
        mask = torch.ones(1, 4, dtype=torch.bool)
        buffer = filled([sample(1).with_fields(action_mask=mask, advantages=torch.tensor([numbers]))])
        buffer.normalize("advantages")
        return buffer.items[0].advantages[0].tolist()

    assert normalized([7.0] * 4) == [0.0] * 4
    expected = [-1.3416407864998738, -0.4472135954999579, 0.4472135954999579, 1.3416407864998738]
    assert normalized([1e6 + k for k in range(4)]) == pytest.approx(expected, abs=1e-6)


def test_a_buffer_without_any_action_can_be_normalized() -> None:
    empty, idle = ReplayBuffer(), filled([SAMPLES[6]])
    for buffer in (empty, idle):
        buffer.normalize("advantages")
    assert len(empty) == 0
    assert bool((idle.items[0].advantages == 0).all())


def test_other_fields_are_left_alone_by_normalization() -> None:
    buffer = filled(SAMPLES)
    buffer.normalize("advantages")
    for item, original in zip(buffer.items, SAMPLES, strict=True):
        for name, tensor in original.tensors().items():
            if name != "advantages":
                assert torch.equal(item.tensors()[name], tensor)


def test_a_batch_enters_as_single_samples_without_padding() -> None:
    buffer = ReplayBuffer()
    buffer.append(
        Experience(
            sequences=torch.tensor([[4, 5, 0], [6, 7, 8]]),
            attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(),
            action_mask=torch.tensor([[0, 1, 0], [0, 0, 1]]).bool(),
            rollout_log_probs=torch.zeros(2, 3),
            scores=torch.tensor([1.0, 2.0]),
            truncated=torch.tensor([True, False]),
        )
    )
    assert [item.sequences.tolist() for item in buffer.items] == [[[4, 5]], [[6, 7, 8]]]
    assert [item.scores.tolist() for item in buffer.items] == [[1.0], [2.0]]


def test_beyond_the_limit_the_oldest_samples_leave() -> None:
    buffer = filled(SAMPLES, limit=3)
    assert [int(item.scores) for item in buffer.items] == [8, 9, 10]
    assert len(filled(SAMPLES, limit=0)) == N


def test_clear_forgets_everything() -> None:
    buffer = filled(SAMPLES)
    buffer.clear()
    assert len(buffer) == 0
    assert steps(buffer) == []


@pytest.mark.parametrize("offload", [True, False])
def test_offloading_decides_whether_samples_move_to_the_cpu(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Experience, "to", lambda self, device: moved.append(device) or self)
    filled(SAMPLES[:2], cpu_offload=offload)
    assert moved == (["cpu", "cpu"] if offload else [])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("batch_size", "micro"), [(4, 2), (3, 1), (N, 3), (100, 100), (1, 1)])
def test_every_sample_is_used_exactly_once_per_epoch(
    world_size: int, batch_size: int, micro: int, on_ranks: OnRanks
) -> None:
    def work(comm: Any) -> list[list[int]]:
        return [names(b) for b in steps(filled(shares(world_size)[comm.rank], comm), batch_size, micro, epochs=2)]

    of_ranks = on_ranks(world_size, work)
    per_epoch = -(-N // batch_size)
    for epoch in range(2):
        of_epoch = [of_rank[epoch * per_epoch : (epoch + 1) * per_epoch] for of_rank in of_ranks]
        used = [number for of_rank in of_epoch for of_step in of_rank for number in of_step]
        assert sorted(used) == list(range(N))
    assert {len(of_rank) for of_rank in of_ranks} == {2 * per_epoch}


def test_the_samples_of_a_step_are_the_same_for_any_number_of_ranks(on_ranks: OnRanks) -> None:
    def composition(world_size: int) -> list[list[int]]:
        def work(comm: Any) -> list[list[int]]:
            return [names(b) for b in steps(filled(shares(world_size)[comm.rank], comm), epochs=2)]

        return [
            sorted(itertools.chain.from_iterable(of_ranks))
            for of_ranks in zip(*on_ranks(world_size, work), strict=True)
        ]

    single = [names(batch) for batch in steps(filled(SAMPLES), epochs=2)]
    assert [len(step) for step in single] == [4, 4, 3, 4, 4, 3]
    assert composition(2) == single
    assert composition(3) == single


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("batch_size", "micro"), [(4, 2), (3, 1), (5, 1), (1, 1), (N, 2)])
def test_all_ranks_run_equally_many_micro_batches(
    world_size: int, batch_size: int, micro: int, on_ranks: OnRanks
) -> None:
    def work(comm: Any) -> list[MiniBatch]:
        return steps(filled(shares(world_size)[comm.rank], comm), batch_size, micro)

    for of_ranks in zip(*on_ranks(world_size, work), strict=True):
        assert len({len(batch.micro_batches) for batch in of_ranks}) == 1
        assert all(batch.micro_batches for batch in of_ranks)
        sizes = [len(names(batch)) for batch in of_ranks]
        assert max(sizes) - min(sizes) <= 1


def test_idle_micro_batches_have_no_action(on_ranks: OnRanks) -> None:
    def work(comm: Any) -> MiniBatch:
        return steps(filled(shares(2)[comm.rank], comm), batch_size=1, micro=1)[0]

    shares_of_step = on_ranks(2, work)
    [idle] = [batch for batch in shares_of_step if names(batch) == []]
    assert len(idle.micro_batches) == 1
    assert not idle.micro_batches[0].action_mask.any()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_token_count_is_that_of_the_whole_step_on_every_rank(world_size: int, on_ranks: OnRanks) -> None:
    def work(comm: Any) -> list[tuple[int, list[int]]]:
        return [(b.n_tokens, names(b)) for b in steps(filled(shares(world_size)[comm.rank], comm))]

    actions = [sum(s.action_mask[0].tolist()) for s in SAMPLES]
    for of_ranks in zip(*on_ranks(world_size, work), strict=True):
        expected = sum(actions[number] for _, numbers in of_ranks for number in numbers)
        assert [n_tokens for n_tokens, _ in of_ranks] == [expected] * world_size


def test_a_micro_batch_has_at_most_the_size_asked_for_and_rows_as_they_were_put_in() -> None:
    for batch in steps(filled(SAMPLES), batch_size=N, micro=3):
        sizes = [len(micro) for micro in batch.micro_batches]
        assert max(sizes) == 3
        assert sum(sizes) == N
        for micro in batch.micro_batches:
            for i in range(len(micro)):
                original = SAMPLES[int(micro.scores[i])]
                length = original.sequences.shape[1]
                assert torch.equal(micro.sequences[i, :length], original.sequences[0])
                assert torch.equal(micro.advantages[i, :length], original.advantages[0])
                assert micro.attention_mask[i].sum() == length
                assert micro.action_mask[i].sum() == original.action_mask.sum()


def test_samples_survive_the_way_between_ranks_unchanged(on_ranks: OnRanks) -> None:
    def work(comm: Any) -> list[Experience]:
        return [micro for b in steps(filled(shares(2)[comm.rank], comm), 1, 1) for micro in b.micro_batches]

    received = {
        int(row.scores): row for of_rank in on_ranks(2, work) for row in of_rank if row.attention_mask.sum() > 2
    }
    for number, original in enumerate(SAMPLES):
        assert received[number].tensors().keys() == original.tensors().keys()
        for name, tensor in original.tensors().items():
            assert torch.equal(received[number].tensors()[name], tensor)


def test_each_epoch_has_its_own_order_and_a_seed_repeats_them_all() -> None:
    def orders(seed: int) -> list[list[int]]:
        batches = steps(filled(SAMPLES), batch_size=1, micro=1, epochs=3, seed=seed)
        flat = [names(batch)[0] for batch in batches]
        return [flat[start : start + N] for start in range(0, 3 * N, N)]

    first, second, third = orders(3)
    assert first != second != third != first
    assert first != list(range(N))
    assert orders(3) == [first, second, third]
    assert orders(4)[0] != first


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_a_token_budget_ranks_run_equally_many_micro_batches_that_fit(world_size: int, on_ranks: OnRanks) -> None:
    def work(comm: Any) -> list[MiniBatch]:
        return list(filled(shares(world_size)[comm.rank], comm).mini_batches(N, 1, 1, 3, micro_tokens=14))

    (batches,) = zip(*on_ranks(world_size, work), strict=True)
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert sorted(name for batch in batches for name in names(batch)) == list(range(N))
    sizes = [micro.sequences.numel() for batch in batches for micro in batch.micro_batches]
    assert max(sizes) <= 14
    assert len([micro for batch in batches for micro in batch.micro_batches if len(micro) > 1]) > 1


def test_ranks_get_nearly_equally_many_tokens(on_ranks: OnRanks) -> None:
    """Samples of 3 to 7 tokens, the shortest first: dealt out in that order one rank would have many more."""
    ordered = sorted(SAMPLES, key=lambda s: s.sequences.shape[1])

    def work(comm: Any) -> list[MiniBatch]:
        return list(filled(ordered if comm.rank == 0 else [], comm).mini_batches(N, 2, 1, 3))

    (batches,) = zip(*on_ranks(2, work), strict=True)
    tokens = [sum(int(micro.attention_mask.sum()) for micro in batch.micro_batches) for batch in batches]
    assert abs(tokens[0] - tokens[1]) <= 7


def test_idle_micro_batches_share_no_memory() -> None:
    """A step that is skipped saves its batch, and safetensors writes no tensors that share memory."""
    step = {i: like(sample(0), length) for i, length in enumerate((10, 12, 3, 9, 16))}
    shares = [ReplayBuffer(SimpleNamespace(rank=r, world_size=2))._share(step, 8, 32) for r in range(2)]
    rows = [[micro.sequences for micro in share.micro_batches] for share in shares]
    assert sorted(sum(row.shape[1] == 2 for row in of_rank) for of_rank in rows) == [0, 2]
    for of_rank in rows:
        assert len({row.data_ptr() for row in of_rank}) == len(of_rank)


def like(one: Experience, length: int) -> Experience:
    """A sample of another length."""
    return one.with_fields(
        **{name: t[:, :1].expand(1, length) for name, t in one.tensors().items() if t.dim() == 2},
    )
