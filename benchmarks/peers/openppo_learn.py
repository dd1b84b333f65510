"""OpenPPO as a participant of ``benchmarks/learning.py``: PPO, or GRPO with its KL in the loss."""

from pathlib import Path
from typing import Any

import learn
import turns


def options(arguments: Any, task: learn.Task) -> dict[str, Any]:
    """Options of train_ppo by name."""
    of_task: dict[str, Any] = {"reward_pretrain": str(arguments.folder / "critic")}
    if arguments.task == "stories":
        of_task = {
            "reward_fn": str(
                Path(__file__).resolve().parents[2] / "examples" / "reward_sentiment.py"
            )
        }
    given = of_task | {
        "pretrain": str(arguments.folder / "policy"),
        "prompt_data": str(arguments.folder / "prompts.jsonl"),
        "input_key": "input",
        "rollout_batch_size": task.samples,
        "micro_rollout_batch_size": task.samples,
        "train_batch_size": task.mini_batch,
        "micro_train_batch_size": task.mini_batch,
        "max_epochs": task.epochs,
        "max_steps": arguments.rollouts,
        "max_samples": arguments.rollouts * task.samples,
        "generate_max_len": task.new_tokens,
        "actor_learning_rate": task.actor_rate,
        "reward_clip_range": (-learn.NO_CLIP, learn.NO_CLIP),
        "seed": arguments.seed,
        "save_path": arguments.save_path,
        "save_steps": 0,
        "max_num_seqs": task.samples,  # peers decode a rollout in one batch too
    }
    if arguments.algorithm == "grpo":
        return given | {
            "advantage_estimator": "group_norm",
            "n_samples_per_prompt": learn.GROUP,
            "rollout_batch_size": task.samples // learn.GROUP,
            "max_samples": arguments.rollouts * task.samples // learn.GROUP,
            "use_kl_loss": True,
            "kl_estimator": "k3",
            "init_kl_coef": learn.BETA,
        }
    return given | {
        "critic_pretrain": str(arguments.folder / "critic"),
        "critic_learning_rate": task.critic_rate,
        "value_clip": task.value_clip,
        "init_kl_coef": task.kl,
        "lambd": task.lambd,
    }


def main() -> None:
    """Load, train, save."""
    arguments = learn.options(__doc__)
    task = learn.TASKS[arguments.task]
    curve = learn.Curve(task)

    from openppo.config import TrainPPOConfig, from_options
    from openppo.trainer import build_ppo_trainer, quiet_libraries

    quiet_libraries()
    turns.use_threads()
    trainer = build_ppo_trainer(from_options(TrainPPOConfig, **options(arguments, task)))
    curve.start()
    for prompts in trainer.prompt_batches():
        metrics = trainer.step(prompts)
        trainer.report(metrics)
        curve.step(metrics["reward"])
    trainer.save()
    trainer.close()


if __name__ == "__main__":
    main()
