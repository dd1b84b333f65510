"""The order of the data depends on seed, epoch and position alone."""

from itertools import chain, islice

import pytest

from openppo.datasets import BatchSampler, cyclic_batches, shard


def test_an_epoch_has_every_row_once():
    sampler = BatchSampler(n_rows=10, batch_size=4, seed=1)
    batches = list(sampler.batches(epoch=0))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert len(sampler) == 3
    assert sorted(chain(*batches)) == list(range(10))


def test_drop_last_leaves_the_short_batch_out():
    sampler = BatchSampler(n_rows=10, batch_size=4, seed=1, drop_last=True)
    assert [len(batch) for batch in sampler.batches(epoch=0)] == [4, 4]
    assert len(sampler) == 2


def test_without_shuffle_rows_keep_their_order():
    sampler = BatchSampler(n_rows=5, batch_size=2, seed=1, shuffle=False)
    assert list(sampler.batches(epoch=3)) == [[0, 1], [2, 3], [4]]


def test_the_same_seed_and_epoch_give_the_same_order_and_others_another():
    def order(seed, epoch):
        return list(chain(*BatchSampler(50, 7, seed).batches(epoch)))

    assert order(1, 2) == order(1, 2)
    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(o) for o in orders}) == 16
    assert list(range(50)) not in orders


@pytest.mark.parametrize("start", range(5))
def test_an_epoch_resumed_at_any_batch_goes_on_as_if_never_stopped(start):
    sampler = BatchSampler(n_rows=15, batch_size=4, seed=3)
    whole = list(sampler.batches(epoch=2))
    assert list(sampler.batches(epoch=2, start=start)) == whole[start:]


def test_impossible_sizes_and_positions_are_errors():
    with pytest.raises(ValueError, match="3 rows do not fill one batch of 4"):
        BatchSampler(3, 4, seed=0, drop_last=True)
    with pytest.raises(ValueError, match="0 rows"):
        BatchSampler(0, 4, seed=0)
    with pytest.raises(ValueError, match="no batch 3 in epoch 0: an epoch has 2 batches"):
        BatchSampler(8, 4, seed=0).batches(0, start=3)
    with pytest.raises(ValueError, match="in batches of 0"):
        cyclic_batches(3, 0, seed=0)
    with pytest.raises(ValueError, match="no batch -1"):
        cyclic_batches(3, 2, seed=0, start=-1)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 16])
def test_cyclic_batches_are_full_and_run_through_passes_without_gaps(batch_size):
    n_rows = 5
    batches = list(islice(cyclic_batches(n_rows, batch_size, seed=9), 20))
    assert {len(batch) for batch in batches} == {batch_size}
    indexes = list(chain(*batches))
    passes = [indexes[i : i + n_rows] for i in range(0, len(indexes) - n_rows + 1, n_rows)]
    assert all(sorted(one) == list(range(n_rows)) for one in passes)
    assert len({tuple(one) for one in passes}) > 1


@pytest.mark.parametrize("start", [0, 1, 4, 11])
def test_cyclic_batches_resume_at_any_batch(start):
    whole = list(islice(cyclic_batches(7, 3, seed=9), 20))
    assert list(islice(cyclic_batches(7, 3, seed=9, start=start), 20 - start)) == whole[start:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 16])
def test_shards_of_all_ranks_restore_the_batch_and_are_balanced(length, world_size):
    batch = [f"row {i}" for i in range(length)]
    shards = [shard(batch, rank, world_size) for rank in range(world_size)]
    assert list(chain(*shards)) == batch
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_shard_of_a_rank_that_does_not_exist_is_our_mistake():
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        shard([1], 2, 2)
