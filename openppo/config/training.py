"""The options that all commands that train have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from openppo.config.fields import Options, given_options, raise_first
from openppo.config.models import LoRAConfig, refuse_overwriting
from openppo.config.run import (
    AdamConfig,
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    RunConfig,
    TrackingConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Options):
    """Options of a command that trains: a tuple of groups, with these in common."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def input_models(self) -> dict[str, str | None]:
        """Input models by flag; None where an option is not given."""
        models = {}
        for name, value in given_options(self).items():
            if name.endswith("pretrain") or name == "lora_path":
                models[f"--{name}"] = value
        return models

    @property
    def output_models(self) -> dict[str, str]:
        """Folders that receive models, by flag."""
        return {"--save_path": self.run.save_path}

    def validate(
        self, world_size: int = 1, own_source: bool = False, own_rewards: bool | None = None
    ) -> None:
        """Raise ``ValueError`` for options that cannot work on ``world_size`` ranks that train.

        With ``own_source`` the caller's source gives prompts and rewards and evaluates. ``own_rewards`` is true if the
        agent gives rewards; None while nothing but the options is known.
        """
        super().validate()
        raise_first(self.problems_on(self.run.dry_run_ranks or world_size))
        refuse_overwriting(self.input_models, self.output_models)
        if not own_source:
            raise_first(self.missing_inputs(own_rewards))

    def training_ranks(self, world_size: int) -> int:
        """Return the number of ranks that train, among all that were launched."""
        return world_size

    def missing_inputs(self, own_rewards: bool | None = None) -> Iterator[str]:
        """Yield messages about data that other options need."""
        options = given_options(self)
        flag = "eval_data" if "eval_data" in options else "eval_dataset"
        missing = options[flag] is None and not options.get("eval_n_envs")
        best = self.checkpoint.keep_best
        if missing and best is not None:
            yield f"--keep_best {best} compares evaluations: give held-out data with --{flag}."
        for condition in self.run.stop_conditions:
            if missing and condition.metric.startswith("eval"):
                yield f"--stop_when {condition.text!r} looks at evaluations: give held-out data with --{flag}."

    def problems_on(self, ranks: int) -> Iterator[str]:
        """Yield messages about groups of options that cannot work together on ``ranks``, each with a remedy."""
        samples = self.batch.train_batch_size
        if samples % ranks != 0:
            yield f"--train_batch_size {samples} does not divide among {ranks} ranks: use a multiple of {ranks}."
        if self.lora.load_in_4bit and self.deepspeed.zero_stage == 3:
            yield "--load_in_4bit: 4-bit weights cannot be partitioned; use --zero_stage 0, 1 or 2."
