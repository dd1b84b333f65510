"""Every option of every command, declared once.

A field is a flag of the same name: ``LossConfig.eps_clip`` is ``--eps_clip`` and reaches the code as
``config.loss.eps_clip``. Fields are grouped by the part of the library that owns them; a command's config
(``TrainPPOConfig``, ``TrainSFTConfig``, ...) is a tuple of groups, flat on the command line.

Only the standard library is imported here, so ``--help`` is quick.
"""

from openppo.config.commands import CommandConfig as CommandConfig, SupervisedCommand as SupervisedCommand
from openppo.config.commands import TrainPPOConfig as TrainPPOConfig, TrainPRMConfig as TrainPRMConfig
from openppo.config.commands import TrainRMConfig as TrainRMConfig, TrainSFTConfig as TrainSFTConfig
from openppo.config.data import DataFormat as DataFormat, PPODataConfig as PPODataConfig, RowsConfig as RowsConfig
from openppo.config.data import parse_probs as parse_probs, parse_template_kwargs as parse_template_kwargs
from openppo.config.data import PreferenceConfig as PreferenceConfig, ProcessConfig as ProcessConfig
from openppo.config.data import SFTDataConfig as SFTDataConfig, SupervisedConfig as SupervisedConfig
from openppo.config.fields import flat_dict as flat_dict, from_options as from_options
from openppo.config.fields import mask_credentials as mask_credentials
from openppo.config.models import LoRAConfig as LoRAConfig, PPOModelConfig as PPOModelConfig
from openppo.config.models import refuse_overwriting as refuse_overwriting
from openppo.config.ppo import AdvantageConfig as AdvantageConfig, AdvantageEstimator as AdvantageEstimator
from openppo.config.ppo import KLConfig as KLConfig, LossAggregation as LossAggregation, LossConfig as LossConfig
from openppo.config.ppo import PPOConfig as PPOConfig, PPOLearningRateConfig as PPOLearningRateConfig
from openppo.config.ppo import PolicyLossType as PolicyLossType, RolloutCorrection as RolloutCorrection
from openppo.config.rewards import RewardConfig as RewardConfig, RewardShapingConfig as RewardShapingConfig
from openppo.config.rewards import Verifier as Verifier
from openppo.config.rollout import EvaluationConfig as EvaluationConfig, GenerationConfig as GenerationConfig
from openppo.config.run import AdamConfig as AdamConfig, BatchConfig as BatchConfig
from openppo.config.run import CheckpointConfig as CheckpointConfig, Condition as Condition
from openppo.config.run import DeepSpeedConfig as DeepSpeedConfig, RunConfig as RunConfig
from openppo.config.run import TrackingConfig as TrackingConfig
from openppo.config.tools import CheckpointModelConfig as CheckpointModelConfig, EvaluateConfig as EvaluateConfig
from openppo.config.tools import ExportConfig as ExportConfig, GenerateConfig as GenerateConfig
from openppo.config.tools import JudgementConfig as JudgementConfig, MergeConfig as MergeConfig
from openppo.config.tools import MergeLoRAConfig as MergeLoRAConfig, OutputConfig as OutputConfig
from openppo.config.tools import PromptsConfig as PromptsConfig, ReportConfig as ReportConfig
from openppo.config.tools import ReportPageConfig as ReportPageConfig, ServeRMConfig as ServeRMConfig
from openppo.config.tools import ServerConfig as ServerConfig
