"""The configs of the supervised commands, and the rules of all options of training."""

from __future__ import annotations

from dataclasses import Field, dataclass, field

from openppo.config.data import PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.config.fields import Rules, declared_options, rules_of
from openppo.config.train_ppo import TrainPPOConfig
from openppo.config.training import TrainingConfig


@dataclass(frozen=True)
class SupervisedCommand(TrainingConfig):
    """Options of openppo.cli.train_sft, train_rm and train_prm; each adds the group ``data``."""

    supervised: SupervisedConfig

    @property
    def pack_to(self) -> int | None:
        """Tokens of a row that several samples may share; None if each sample has a row."""
        return None


@dataclass(frozen=True)
class TrainSFTConfig(SupervisedCommand):
    """Options of openppo.cli.train_sft."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)

    @property
    def pack_to(self) -> int | None:
        return self.supervised.max_len if self.data.packing else None


@dataclass(frozen=True)
class TrainRMConfig(SupervisedCommand):
    """Options of openppo.cli.train_rm."""

    data: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class TrainPRMConfig(SupervisedCommand):
    """Options of openppo.cli.train_prm."""

    data: ProcessConfig = field(default_factory=ProcessConfig)


def training_rules() -> dict[str, Rules]:
    """Return the rules of the options of all commands that train, by name."""
    options: dict[str, Field] = {}
    for command in (TrainPPOConfig, TrainSFTConfig, TrainRMConfig, TrainPRMConfig):
        options |= declared_options(command)
    return {name: rules_of(option) for name, option in options.items()}
