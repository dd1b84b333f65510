"""OpenPPO as a participant: ``trainer.step(prompts)`` with the library's defaults.

Given are the batch sizes of the workload, its lengths and the dtype; ``--compile``, ``--old_log_probs``,
``--share_prompts`` and ``--micro_rollout_batch_size`` add the options of these names. With ``--parts`` it also reports
what the engines take: generation, forwards, backwards and optimizer steps.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns


class PartTimers:
    """Seconds spent in calls of the engines; of nested calls the outermost counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running = False

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of ``owner.name`` as ``part``."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return call(*args, **kwargs)
            self._running, start = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._running = False
                self.seconds[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = {f"part_{name}": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken


def time_parts(trainer: Any) -> PartTimers:
    """Timers around all calls of models in a step."""
    from openppo.strategy.trainable_model import TrainableModel

    timers, parts = PartTimers(), trainer.components
    timers.wrap(parts.engine, "step", "generation")
    timers.wrap(TrainableModel, "__call__", "forward")
    timers.wrap(TrainableModel, "backward", "backward")
    timers.wrap(TrainableModel, "step", "optimizer")
    for frozen in (
        parts.maker.reference,
        getattr(parts.data.tasks[0].scorer, "model", None),
    ):  # a reward function has no model
        if frozen is not None:
            timers.wrap(frozen, "forward", "forward")
    return timers


def group_options(arguments: Any, folder: Path) -> dict[str, Any]:
    """Options of a workload with groups, whose files are written to ``folder``."""
    prompts = "".join(
        json.dumps({"input": text}) + "\n" for text in turns.group_prompts(arguments.workload)
    )
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    (folder / "reward.py").write_text(
        "def reward_fn(response):\n    return float(len(response) % 7)\n"
    )
    return {
        "pretrain": turns.policy(arguments),
        "apply_chat_template": arguments.workload == "w5",
        "reward_fn": str(folder / "reward.py"),
        "prompt_data": str(folder / "prompts.jsonl"),
        "prompt_max_len": turns.PROMPT_TOKENS.get(arguments.workload, 64),
        "rollout_batch_size": turns.BATCH // turns.GROUP,
        "n_samples_per_prompt": turns.GROUP,
        "advantage_estimator": "group_norm",
        "init_kl_coef": arguments.kl,
        "use_kl_loss": arguments.kl > 0,
        "kl_estimator": "k3" if arguments.kl > 0 else "k1",
        "generate_max_len": turns.NEW_TOKENS[arguments.workload],
        "train_batch_size": turns.BATCH,
        "micro_train_batch_size": arguments.micro or None,
        "bf16": arguments.dtype == "bf16",
        "save_path": str(folder),
        **({"share_prompts": arguments.share_prompts} if arguments.share_prompts else {}),
    }


def options(arguments: Any, folder: str) -> dict[str, Any]:
    """Options of train_ppo by name."""
    if arguments.workload not in ("w1", "w2"):
        return group_options(arguments, Path(folder))
    models = arguments.assets / arguments.workload
    return {
        "pretrain": str(models / "policy"),
        "reward_pretrain": str(models / "reward"),
        "prompt_data": str(arguments.assets / "prompts.jsonl"),
        "input_key": "input",
        "prompt_max_len": 64,
        "generate_max_len": turns.NEW_TOKENS[arguments.workload],
        "rollout_batch_size": turns.BATCH,
        "train_batch_size": turns.BATCH,
        "micro_train_batch_size": arguments.micro or None,
        "bf16": arguments.dtype == "bf16",
        "old_log_probs": arguments.old_log_probs,
        "micro_rollout_batch_size": arguments.micro_rollout_batch_size or None,
        "save_path": folder,
    }


def main() -> None:
    """Load, then take turns."""
    parser = turns.options(__doc__)
    parser.add_argument(
        "--compile", action="store_true", help="with the option --compile of train_ppo"
    )
    parser.add_argument("--old_log_probs", default="auto", help="as of train_ppo")
    parser.add_argument(
        "--micro_rollout_batch_size", type=int, default=8, help="of W1 and W2; 0: the default"
    )
    parser.add_argument("--share_prompts", help="as of train_ppo")
    parser.add_argument(
        "--micro",
        type=int,
        default=turns.MICRO_TRAIN_BATCH,
        help="samples of a micro-batch; 0: the default",
    )
    parser.add_argument("--parts", action="store_true", help="time the engines' calls too")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[], help="responses of each turn; all else 64"
    )
    arguments = parser.parse_args()
    clock = turns.Turns()

    import deepspeed
    import torch
    import transformers

    from openppo.config import TrainPPOConfig, flat_dict, from_options
    from openppo.trainer import build_ppo_trainer, quiet_libraries

    quiet_libraries()
    turns.use_threads()
    given = options(arguments, os.environ["RUN_FOLDER"])
    if arguments.compile:
        defaults = flat_dict(from_options(TrainPPOConfig, **given))
        if "compile" not in defaults:
            clock.skip("this OpenPPO has no option --compile")
        given["compile"] = (
            True if isinstance(defaults["compile"], bool) else "on"
        )  # a bool in earlier commits
    trainer = build_ppo_trainer(from_options(TrainPPOConfig, **given))
    timers = time_parts(trainer) if arguments.parts else None
    batches = trainer.prompt_batches()
    clock.ready(
        torch=torch.__version__,
        transformers=transformers.__version__,
        deepspeed=deepspeed.__version__,
    )
    same: dict[str, float] = {}
    for turn in clock:
        prompts = next(batches)
        if turn < len(arguments.sizes):
            prompts = trainer.components.data.prompts[: arguments.sizes[turn]]
        has_groups = trainer.config.ppo.n_samples_per_prompt > 1
        before = projected(trainer) if has_groups and not same else 0.0
        metrics = trainer.step(prompts)
        trainer.report(metrics)
        n_responses = len(prompts) * trainer.config.ppo.n_samples_per_prompt
        more = timers.take() if timers else {}
        if has_groups and not same:  # later steps may sample other tokens, by rounding
            same = {
                f"same_{name}": metrics[name]
                for name in ("reward", "policy_loss", "actor_grad_norm")
            }
            same["same_update"] = (projected(trainer) - before) / metrics["actor_learning_rate"]
        clock.report(**phases(metrics, n_responses), **more, **same)
    trainer.close()


def projected(trainer: Any) -> float:
    """The actor's float32 weights times random signs, over the root of their number.

    Adam's first update is of +-1 learning rate for each weight: in these units the projection of one is about 1, and
    that of the difference of two about what they differ by.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    draw, total, n_weights = torch.Generator().manual_seed(0), 0.0, 0
    for parameter in trainer.components.actor.module.parameters():
        full = safe_get_full_fp32_param(parameter)  # under bf16 the optimizer's own
        weights = (parameter if full is None else full).detach().flatten()
        signs = torch.randint(2, weights.shape, generator=draw, dtype=torch.int8)
        total += float((weights * (2 * signs - 1)).sum(dtype=torch.float64))
        n_weights += weights.numel()
    return total / math.sqrt(n_weights)


def phases(metrics: dict[str, float], n_responses: int) -> dict[str, float]:
    """Seconds of the phases and response tokens, from the metrics of a step."""
    return {
        "generation": metrics["time/generation_s"],
        "experience": metrics["time/experience_s"] + metrics["time/scoring_s"],
        "training": metrics["time/training_s"],
        "tokens": round(metrics["response_length"] * n_responses),
    }


if __name__ == "__main__":
    main()
