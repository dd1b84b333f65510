"""Evaluations: each prompt is sampled as its task says, also after another task has joined."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import PlayerParts
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import HeldOut
from openppo.sources.outcomes import OutcomePlayer
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.task import Task, Tasks
from openppo.types import Prompt, SingleProcess, StopCheck
from tests.unit.agents.conftest import ScriptedEngine, make_chat_tokenizer


class FreeEngine(ScriptedEngine):
    """Its weights need nothing."""

    def with_weights(self, weights):
        return nullcontext()


def task(name, longest):
    config = from_options(
        TrainPPOConfig,
        pretrain="MODEL",
        reward_fn="r.py",
        generate_max_len=longest,
        eval_temperature=0.5,
    )
    held_out = [Prompt("x", [5])] * (2 if name == "four" else 1)
    return Task(name, config).with_prompts([], held_out)


@pytest.fixture
def rank():
    """An engine, the tasks ``two`` and ``four`` on a rank, and the parts of its players."""
    tokenizer = make_chat_tokenizer()
    driver = EngineDriver(FreeEngine(tokenizer, lambda text: "abcdefgh"))
    parts = PlayerParts(driver, tokenizer, [tokenizer.eos_token_id], SingleProcess(), longest=100)
    tasks = Tasks([task("two", 2), task("four", 4)], mixed=True)
    player = GroupPlayer(tasks.players(parts), driver)
    sampler = RankSampler(driver.engine, None, player, SingleProcess(), None, version=lambda: 3)
    yield SimpleNamespace(tasks=tasks, player=player, sampler=sampler, parts=parts)
    player.close()


def test_a_task_that_joins_leaves_evaluations_of_others_alone(rank):
    config = rank.tasks.tasks[0].config
    held_out = HeldOut(config, rank.tasks.tasks, rank.sampler, StopCheck(), nullcontext)

    def evaluated():
        return [
            (sample.prompt.task, len(sample.last.response_ids), sample.group)
            for sample in held_out.evaluate()
        ]

    alone = evaluated()
    assert alone == [("two", 2, 0), ("four", 4, 1), ("four", 4, 2)]
    engine = rank.sampler.engine
    assert {params.temperature for params, *_ in engine.submitted} == {0.5}, "the evaluation's"
    assert engine.version == 3

    outcomes = OutcomePlayer({}, rank.player, rank.parts, scorer=None)
    rank.player.driver.drive(outcomes.join(task("six", 6)))
    assert evaluated() == alone
