"""verl's Agent/Env interface in its overlapping form: sampling continues during training, within a bound."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from openppo.agents import AgentPlayer
from openppo.agents.compat import PromptRequest
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.kept import oldest_version
from openppo.sources.overlap import OverlappingDataset
from openppo.types import Completion, FinishReason, Prompt, SamplingParams, segments_of
from tests.unit.agents.conftest import ScriptedEngine, make_chat_tokenizer

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents" / "programs.md"
GROUPS, SAMPLES = 8, 4
"""Of a batch, and of a row: those of the page."""


def documented():
    """The function of the page."""
    blocks = [
        block.split("```")[0] for block in PAGE.read_text(encoding="utf-8").split("```python\n")
    ]
    [block] = [block for block in blocks if "def train_overlapping" in block]
    names = {}
    exec(block, names)
    return names["train_overlapping"]


def begin(dataset, *groups, n_samples=2):
    """Futures of groups whose episodes are called by number of group and sample."""
    return [
        dataset.begin_group(group, [f"{group}/{i}" for i in range(n_samples)]) for group in groups
    ]


def play(dataset, group, *scores, versions=(0, 0)):
    """End the episodes of a group, each after one turn with tokens of ``versions``."""
    for i, score in enumerate(scores):
        request = PromptRequest(f"{group}/{i}", Prompt("", [5, 6]), SamplingParams(8), 0, group)
        dataset.put_batch(
            [request], [Completion([7, 8], [-0.5] * 2, list(versions), FinishReason.STOP)]
        )
        asyncio.run(request.receive())
        dataset.notify_score(request.request_id, score, 1)


def test_the_documented_loop_trains_on_whole_fresh_groups(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": [f"count to {i}" for i in range(60)], "n": list(range(60))}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "tasks.parquet")
    monkeypatch.chdir(tmp_path)

    async def solve(task, session):
        for _ in range(1 + task["n"] % 5):  # uneven episodes
            await session.chat(task.messages)
            await asyncio.sleep(0.002)
        if task["n"] % 7 == 3:
            raise RuntimeError("broken")
        return 1.0

    tokenizer, batches = make_chat_tokenizer(), []
    trainer = SimpleNamespace(train_on=batches.append)
    documented()(
        AgentPlayer(solve),
        tokenizer,
        ScriptedEngine(tokenizer, lambda prompt: "yes"),
        trainer,
        steps=4,
    )
    assert len(batches) == 4
    for step, batch in enumerate(batches):
        sizes = Counter(sample.group for sample in batch)
        assert set(sizes.values()) == {SAMPLES} and len(sizes) == GROUPS
        assert len({id(sample.episode) for sample in batch}) == len(batch)
        newest = max(max(segment.versions) for segment in segments_of(batch))
        assert step - 1 <= min(map(oldest_version, batch)) and newest <= step
        for sample in batch:
            number = sample.prompt.row["n"]
            assert sample.scores == {"score": 1.0} and number % 7 != 3
            assert len(sample.segments) == sample.episode.n_turns == 1 + number % 5
    assert len({sample.group for batch in batches for sample in batch}) == 4 * GROUPS, (
        "no group is trained on twice"
    )


def test_no_more_groups_begin_than_the_bound_allows():
    dataset = OverlappingDataset(batch_groups=2, max_staleness=1)
    groups = begin(dataset, *range(6))
    assert [group.done() for group in groups] == [True] * 4 + [False] * 2
    play(dataset, 0, 1.0, 1.0)
    play(dataset, 1, 1.0, 1.0)
    assert {sample.group for sample in dataset.take_groups()} == {0, 1}
    assert not groups[4].done(), "the engine has the old weights"
    dataset.advance(1)
    assert all(group.done() for group in groups)


def test_ten_failed_groups_in_a_row_end_the_waiting():
    dataset = OverlappingDataset(batch_groups=2, max_staleness=9)
    begin(dataset, *range(11))
    play(dataset, 0, 1.0, 1.0)
    for group in range(1, 11):
        play(dataset, group, 1.0, None)
    with pytest.raises(
        NothingTrainedError,
        match="10 groups in a row failed; the last: too few episodes of group 10",
    ):
        dataset.take_groups()


def test_groups_older_than_the_bound_are_dropped_and_replaced():
    dataset = OverlappingDataset(batch_groups=1, max_staleness=1)
    groups = begin(dataset, 0, 1, 2, 3)
    play(dataset, 0, 1.0, 2.0)
    assert len(dataset.take_groups()) == 2
    dataset.advance(1)
    dataset.work.advance(2)  # as if another loop had trained
    play(dataset, 1, 1.0, 2.0, versions=(0, 1))
    assert not groups[3].done(), "its place is taken by what is too old"
    assert dataset.take_groups(timeout=0.0) == []
    assert dataset.work.counts["stale"] == 1
    assert groups[3].done()
    play(dataset, 2, 1.0, 2.0, versions=(1, 1))
    assert [sample.scores["score"] for sample in dataset.take_groups()] == [1.0, 2.0]


def test_a_group_needs_two_members_of_several():
    dataset = OverlappingDataset(batch_groups=1, max_staleness=0)
    [group] = begin(dataset, 0, n_samples=3)
    play(dataset, 0, 1.0, None, None)
    [group] = begin(dataset, 1, n_samples=3)
    assert group.done(), "the failed group has left its place"
    play(dataset, 1, 1.0, None, 3.0)
    assert [sample.scores["score"] for sample in dataset.take_groups()] == [1.0, 3.0]
    assert dataset.work.counts["failed"] == 1


def test_a_group_that_is_given_up_while_it_waits_never_begins():
    dataset = OverlappingDataset(batch_groups=1, max_staleness=0)
    _, second, third = begin(dataset, 0, 1, 2)
    second.cancel()
    play(dataset, 0, None, None)
    assert third.done()
    assert dataset.work.running == {2}
