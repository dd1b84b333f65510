"""Every option of every command, declared once.

A field is a flag of the same name: ``LossConfig.eps_clip`` is ``--eps_clip`` and reaches the code as
``config.loss.eps_clip``. Fields are grouped by the part of the library that owns them; a command's config
(``TrainPPOConfig``, ``TrainSFTConfig``, ...) is a tuple of groups, flat on the command line.

``validate()`` raises ``ValueError`` with a message that names the flag and the remedy. Only the standard
library is imported here, so ``--help`` is quick.
"""

from openppo.config.commands import (
    SupervisedCommand,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    flat_dict,
    from_options,
)
from openppo.config.ppo import (
    AdvantageConfig,
    AdvantageEstimator,
    KLConfig,
    LossAggregation,
    LossConfig,
    PolicyLossType,
    PPOConfig,
    PPOLearningRateConfig,
    RolloutCorrection,
)
from openppo.config.rewards import (
    RewardConfig,
    RewardShapingConfig,
    Verifier,
)
from openppo.config.roles import (
    DataFormat,
    EvaluationConfig,
    GenerationConfig,
    PPODataConfig,
    PPOModelConfig,
    parse_probs,
    parse_template_kwargs,
)
from openppo.config.shared import (
    AdamConfig,
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LoRAConfig,
    RunConfig,
    mask_credentials,
)
from openppo.config.supervised import (
    PreferenceConfig,
    ProcessConfig,
    SFTDataConfig,
    SupervisedConfig,
)
from openppo.config.tools import (
    CheckpointModelConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    JudgementConfig,
    MergeConfig,
    MergeLoRAConfig,
    OutputConfig,
    PromptsConfig,
    ReportConfig,
    ReportPageConfig,
    ServerConfig,
    ServeRMConfig,
)
from openppo.config.tracking import TrackingConfig

__all__ = [
    "AdamConfig",
    "AdvantageConfig",
    "AdvantageEstimator",
    "BatchConfig",
    "CheckpointConfig",
    "CheckpointModelConfig",
    "DataFormat",
    "DeepSpeedConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "ExportConfig",
    "GenerateConfig",
    "GenerationConfig",
    "JudgementConfig",
    "KLConfig",
    "LoRAConfig",
    "LossAggregation",
    "LossConfig",
    "MergeConfig",
    "MergeLoRAConfig",
    "OutputConfig",
    "PPOConfig",
    "PPODataConfig",
    "PPOLearningRateConfig",
    "PPOModelConfig",
    "PolicyLossType",
    "PreferenceConfig",
    "ProcessConfig",
    "PromptsConfig",
    "ReportConfig",
    "ReportPageConfig",
    "RewardConfig",
    "RewardShapingConfig",
    "RolloutCorrection",
    "RunConfig",
    "SFTDataConfig",
    "ServeRMConfig",
    "ServerConfig",
    "SupervisedCommand",
    "SupervisedConfig",
    "TrackingConfig",
    "TrainPPOConfig",
    "TrainPRMConfig",
    "TrainRMConfig",
    "TrainSFTConfig",
    "Verifier",
    "flat_dict",
    "from_options",
    "mask_credentials",
    "parse_probs",
    "parse_template_kwargs",
]
