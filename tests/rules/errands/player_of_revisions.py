"""Check of an errand: ``--revise_after TEXT`` is a kind of agent of its own, one ``Player``.

The engine answers with the last token that it reads and 1, so that a draft after 5, 6 is 6, 1. The text is 8, and the
answer after it is 8, 1.
"""

from contextlib import nullcontext

from openppo.agents import agent_source
from openppo.config import TrainPPOConfig, from_options
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.rollout.players import PlayerParts
from openppo.sources.groups import GroupPlayer, play_together
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.types import Completion, FinishReason, Prompt, SingleProcess


class Echo(Engine):
    """Answers all waiting requests in one step."""

    busy = property(lambda self: len(self.waiting) > 0)

    def __init__(self):
        super().__init__()
        self.waiting = {}

    def submit(self, prompt, params, seed, park=False, continue_from=None):
        number = next(self._numbers)
        self.waiting[number] = [prompt.token_ids[-1], 1]
        return number

    def step(self):
        for number, ids in self.waiting.items():
            self._ended[number] = Completion(
                ids, [-0.5, -0.5], versions=[0, 0], finish_reason=FinishReason.STOP
            )
        self.waiting = {}

    def cancel(self, number):
        self.waiting.pop(number, None)

    def with_weights(self, weights):
        return nullcontext()


class Tokenizer:
    """One id for any text."""

    def encode(self, text, add_special_tokens):
        return [8]


config = from_options(
    TrainPPOConfig,
    pretrain="none",
    reward_fn="reward.py",
    n_samples_per_prompt=2,
    revise_after="Check it:",
)
assert config.agents.form == "revise_after"
task = Task("", config, players=agent_source(config.agents))

driver = EngineDriver(Echo())
parts = PlayerParts(driver, Tokenizer(), [1], SingleProcess(), longest=100)
player = GroupPlayer({"": task.player(parts)}, driver)
groups = [task.group(Prompt("ab", [5, 6]), index=0, number=0)]
(played,) = play_together(player, groups, SingleProcess(), metrics=Metrics())
player.close()

for sample in played.samples:
    assert sample.last.token_ids == [5, 6, 6, 1, 8, 8, 1]
    assert sample.last.spans == [(2, 4), (5, 7)]
assert len(played.samples) == 2
