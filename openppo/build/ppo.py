"""Builder of a PPO trainer: options become a trainer in six phases."""

from collections.abc import Sequence
from typing import Unpack

from openppo.build.assemble import assemble
from openppo.build.check import check_run
from openppo.build.data import load_data
from openppo.build.engine import make_engine
from openppo.build.models import load_models
from openppo.build.objects import Given, OwnObjects
from openppo.build.rewards import make_rewards
from openppo.config import TrainPPOConfig
from openppo.rollout.players import Players
from openppo.sources.task import Tasks
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.tracking import Tracker
from openppo.trainer.callbacks import Callback
from openppo.trainer.ppo import PPOTrainer
from openppo.types import RolloutSource


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | Players | Tasks | None = None,
    trackers: Sequence[Tracker] = (),
    **objects: Unpack[Given],
) -> PPOTrainer:
    """Build a trainer from options; ``ValueError`` names the flag or the object at fault.

    ``source`` yields samples, makes the player of an agent's episodes (as ``Players``), or names several ``Tasks``;
    without it the policy responds to prompts. ``trackers`` log on rank 0. ``objects`` are fields of ``OwnObjects`` and
    replace objects that options name: models, a tokenizer, prompts and a reward function.
    """
    if strategy is None:
        strategy = DeepspeedStrategy(
            config.deepspeed, rollout_ranks=config.orchestrator.rollout_ranks
        )

    # What can fail comes before what takes long; each phase reads the results of earlier ones.
    checked = check_run(config, strategy, source, objects=OwnObjects(**objects))
    data = load_data(checked)  # a dry run ends here
    rewards = make_rewards(checked, data)
    models = load_models(checked, data, rewards)
    sampling = make_engine(checked, data, models)
    return assemble(
        checked,
        data,
        rewards,
        models=models,
        sampling=sampling,
        callbacks=callbacks,
        trackers=trackers,
    )
