"""PPO with a tracker of one's own, here MLflow's.

    pip install mlflow
    python examples/mlflow_tracker.py --pretrain MODEL --prompt_data prompts.jsonl --reward_fn reward.py

It takes all flags of train_ppo, also under torchrun. Trackers are used on rank 0 alone, so MLflow's run begins with the
first line that is logged. With --load_checkpoint it continues, by its id beside the logs; repeated steps appear twice.
"""

import re
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, flat_dict
from openppo.tracking import Tracker
from openppo.trainer import build_ppo_trainer, quiet_libraries

PARAMETERS_AT_ONCE = 100  # that MLflow's server takes


class MLflowTracker(Tracker):
    """Metrics of each step; options as parameters; samples as JSON."""

    name = "MLflow"
    errors = (
        Exception,
    )  # what a service raises may be anything: it is left out then, and the run continues

    def __init__(self, config: TrainPPOConfig) -> None:
        self.config = config

    @cached_property
    def mlflow(self) -> Any:
        """The module, with this run active."""
        import mlflow

        kept = Path(self.config.run.save_path) / "logs" / "mlflow_run_id"
        if kept.is_file():  # logs of another run were set aside
            mlflow.start_run(run_id=kept.read_text())
            return mlflow
        kept.write_text(mlflow.start_run(run_name=kept.resolve().parents[1].name).info.run_id)
        options = list(flat_dict(self.config).items())  # without secrets
        for start in range(0, len(options), PARAMETERS_AT_ONCE):
            mlflow.log_params(dict(options[start : start + PARAMETERS_AT_ONCE]))
        return mlflow

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics; MLflow takes fewer characters in names."""
        self.mlflow.log_metrics(
            {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}, step=step
        )

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Log the samples of a step, or of its evaluation."""
        kind = "evaluation" if samples and samples[0].get("evaluation") else "training"
        self.mlflow.log_dict({"samples": samples}, f"samples/{kind}_{step:08d}.json")

    def close(self) -> None:
        """Mark the run as finished, or as failed while an exception is on its way."""
        self.mlflow.end_run("FINISHED" if sys.exc_info()[0] is None else "FAILED")


def main() -> None:
    """Train with the flags of train_ppo."""
    quiet_libraries()
    config = parse_options(TrainPPOConfig, sys.argv[1:])
    trainer = build_ppo_trainer(config, trackers=[MLflowTracker(config)])
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
