"""verl's Agent/Env interface: a queue of prompts, a loop of one's own, PPO steps on what has a score."""

import sys
import threading
from collections import Counter

import pytest
from torch.utils.data import DataLoader

from openppo.agents import AgentPlayer
from openppo.agents.compat import (
    BufferDataset,
    MultiRoundBufferDataset,
    create_and_launch_task_pool,
)
from openppo.agents.program import ProgramAgent
from openppo.config.agents import AgentConfig
from openppo.types import SamplingParams, segments_of
from tests.unit.agents.conftest import ScriptedEngine
from tests.unit.agents.test_program import CLIENT
from tests.unit.trainer.conftest import prompts, trainer_of

BATCH = 4


@pytest.fixture
def parquet(tmp_path):
    """Six questions."""
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "tasks.parquet"
    datasets.Dataset.from_dict(
        {"prompt": [f"count to {i}" for i in range(6)], "n": list(range(6))}
    ).to_parquet(file)
    return str(file)


def drive(server, dataset, engine, batch_size):
    """Answer prompts until enough episodes have a score."""
    waiting = BufferDataset(buffer=server.prompt_queue)
    while dataset.buffer.qsize() < batch_size:
        requests = waiting.take(4, timeout=0.2)
        answered = [engine.generate([r.prompt], r.params, [r.seed])[0] for r in requests]
        dataset.put_batch(requests, answered)


def test_a_loop_of_ones_own_generates_and_takes_ppo_steps(chat_tokenizer, parquet, tmp_path):
    lines = "first = ask(sys.stdin.read())\nsecond = ask('again')\nreward(int(sys.argv[1]) + (second == 'yes'))"
    (tmp_path / "agent.py").write_text(CLIENT + lines)
    source = AgentPlayer(
        ProgramAgent(AgentConfig(agent_command=f"{sys.executable} {tmp_path}/agent.py {{n}}"))
    )
    engine, dataset = (
        ScriptedEngine(chat_tokenizer, lambda prompt: "yes"),
        MultiRoundBufferDataset(),
    )
    server, thread = create_and_launch_task_pool(
        source, chat_tokenizer, notify_score_fn=dataset.notify_score
    )
    enqueue = threading.Thread(target=server.enqueue_task, args=(parquet, 4))
    enqueue.start()
    n_turns = 2 * BATCH
    sizes = {"train_batch_size": n_turns, "rollout_batch_size": n_turns}
    trainer = trainer_of(None, prompts("a", "b"), normalize_advantages="off", **sizes)
    trainer.components.actor.rate = 0.1
    level = trainer.components.actor.module.level
    samples = []
    barrier = threading.Barrier(2)

    def fetch():
        for _ in range(3):
            drive(server, dataset, engine, BATCH)
            barrier.wait()  # a batch is there: the weights may change
            barrier.wait()  # they have changed
            engine.use_version(engine.version + 1)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    for step in range(3):
        barrier.wait()
        batch = next(iter(DataLoader(dataset, batch_size=BATCH, collate_fn=list)))
        for sample in batch:
            assert sample.scores == {"score": sample.prompt.row["n"] + 1.0}
            assert len(sample.segments) == sample.episode.n_turns == 2
            assert sample.prompt.token_ids == sample.segments[0].prompt_ids
        for turn in segments_of(batch):
            prompt = turn.prompt_ids
            assert turn.token_ids[: len(prompt)] == prompt
            assert (prompt, turn.token_ids[len(prompt) :]) in engine.journal
            assert max(turn.versions) <= step
        before = level.item()
        trainer.train_on(batch)
        assert level.item() != before
        samples += batch
        barrier.wait()
    fetching.join()
    drive(server, dataset, engine, 24 - len(samples))
    enqueue.join()
    samples += dataset.take(24)
    assert len(samples) == 24, "four samples of six rows"
    assert len(segments_of(samples)) == 48, "two turns in each"
    assert [sum(sample.fractions) for sample in samples] == pytest.approx([1.0] * 24)
    assert Counter(sample.group for sample in samples) == dict.fromkeys(range(6), 4)
    server.close()
    thread.join()


def test_an_episode_that_fails_leaves_no_sample(chat_tokenizer, parquet):
    async def solve(task, session):
        seeds.add(task.env_seed)
        await session.chat(task.messages)
        if task["n"] % 2:
            raise RuntimeError("broken")
        return 1.0

    dataset, notified, seeds = MultiRoundBufferDataset(), [], set()

    def notify(*score):
        notified.append(score)
        dataset.notify_score(*score)

    server, _ = create_and_launch_task_pool(
        AgentPlayer(solve), chat_tokenizer, notify_score_fn=notify
    )
    enqueue = threading.Thread(target=server.enqueue_task, args=(parquet,))
    enqueue.start()
    while enqueue.is_alive():
        requests = BufferDataset(buffer=server.prompt_queue).take(6, timeout=0.05)
        engine = ScriptedEngine(chat_tokenizer, lambda prompt: "yes")
        dataset.put_batch(
            requests,
            engine.generate([r.prompt for r in requests], SamplingParams(8), [0] * 6),
        )
    assert sorted(notified) == [(str(i), None if i % 2 else 1.0, 1) for i in range(6)]
    samples = dataset.take(6)
    assert sorted(sample.prompt.row["n"] for sample in samples) == [0, 2, 4]
    assert len(segments_of(samples)) == 3
    assert len(seeds) == 6
    server.close()
