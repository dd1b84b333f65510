"""Every option of every command, declared once.

A field is a flag of the same name: ``LossConfig.eps_clip`` is ``--eps_clip`` and reaches the code as
``config.loss.eps_clip``. Fields are grouped by the part of the library that owns them; the config of a training command
(``TrainPPOConfig``, ``TrainSFTConfig``, ...) is a tuple of groups, flat on the command line.

Only the standard library is imported here, so ``--help`` is quick.
"""

from openppo.config.chat import ChatConfig as ChatConfig, CheckConfig as CheckConfig
from openppo.config.correction import Correction as Correction, CorrectionLevel, RolloutCorrection
from openppo.config.data import (
    DataFormat,
    PPODataConfig,
    PreferenceConfig,
    ProcessConfig,
    RowsConfig,
    SFTDataConfig,
)
from openppo.config.data import SupervisedConfig, parse_probs, parse_template_kwargs
from openppo.config.fields import (
    Options,
    flat_dict as flat_dict,
    from_options as from_options,
    mask_credentials,
)
from openppo.config.models import LoRAConfig, ModelConfig, PPOModelConfig, refuse_overwriting
from openppo.config.ppo import (
    AdvantageConfig,
    AdvantageEstimator,
    KLConfig,
    LossAggregation,
)
from openppo.config.ppo import LossConfig, PolicyLossType, PPOConfig
from openppo.config.rewards import RewardConfig, RewardShapingConfig, Verifier
from openppo.config.rollout import EvaluationConfig, GenerationConfig
from openppo.config.run import (
    AdamConfig,
    BatchConfig,
    CheckpointConfig,
    Condition,
    DeepSpeedConfig,
    RunConfig,
)
from openppo.config.run import TrackingConfig
from openppo.config.tools import (
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    MergeLoRAConfig,
    PromptsConfig,
)
from openppo.config.tools import ReportConfig, ServeAgentConfig, ServeRMConfig
from openppo.config.train_ppo import TrainPPOConfig as TrainPPOConfig
from openppo.config.train_supervised import SupervisedCommand
from openppo.config.train_supervised import (
    TrainPRMConfig as TrainPRMConfig,
    TrainRMConfig as TrainRMConfig,
)
from openppo.config.train_supervised import TrainSFTConfig as TrainSFTConfig
