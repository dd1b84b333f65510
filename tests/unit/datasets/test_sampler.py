"""The order of the data depends on seed, epoch and position alone, or is a user's."""

from itertools import chain, islice

import pytest

from openppo.datasets import BatchSampler, cyclic_batches, shard, shuffled


@pytest.mark.parametrize(("n_rows", "sizes"), [(10, [4, 4, 2]), (8, [4, 4])])
def test_an_epoch_has_every_row_once_and_resumes_at_any_batch(n_rows, sizes):
    sampler = BatchSampler(n_rows, batch_size=4, order=shuffled(n_rows, seed=1))
    batches = list(sampler.batches(epoch=3))
    rows = list(chain(*batches))
    assert [len(batch) for batch in batches] == sizes
    assert len(sampler) == len(sizes)
    assert len({*rows}) == len(rows) == sum(sizes)
    assert rows != list(range(n_rows))
    for start in range(len(sampler) + 1):
        assert list(sampler.batches(epoch=3, start=start)) == batches[start:]


def test_the_same_seed_and_epoch_give_the_same_order_and_others_another():
    def order(seed, epoch):
        return tuple(chain(*BatchSampler(50, 7, shuffled(50, seed)).batches(epoch)))

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_a_batch_after_the_epoch_is_an_error():
    with pytest.raises(ValueError, match="no batch 3 in epoch 0: an epoch has 2 batches"):
        BatchSampler(8, 4, shuffled(8, seed=0)).batches(0, start=3)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 16])
def test_cyclic_batches_are_full_run_through_passes_without_gaps_and_resume(batch_size):
    order = shuffled(5, seed=9)
    batches = list(islice(cyclic_batches(5, batch_size, order), 20))
    assert {len(batch) for batch in batches} == {batch_size}
    indexes = list(chain(*batches))
    passes = [indexes[i : i + 5] for i in range(0, len(indexes) - 4, 5)]
    assert all(sorted(one) == list(range(5)) for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    for start in (0, 3, 12):
        assert (
            list(islice(cyclic_batches(5, batch_size, order, start=start), 20 - start))
            == batches[start:]
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 16])
def test_shards_of_all_ranks_restore_the_batch_and_are_balanced(length, world_size):
    batch = [f"row {i}" for i in range(length)]
    shards = [shard(batch, rank, world_size) for rank in range(world_size)]
    assert list(chain(*shards)) == batch
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
