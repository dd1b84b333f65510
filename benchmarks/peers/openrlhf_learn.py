"""OpenRLHF 0.6.1 as a participant of ``benchmarks/learning.py``: its train_ppo on a CPU, see openrlhf_step.py.

It is given prompts with BOS, since it tokenizes them without. This file is also its ``--remote_rm_url``.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import learn
import openrlhf_step
import turns

SPECIAL = ("<s>", "</s>", "<unk>")  # of the stories


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
    """The sentiment of the stories, which it gives with prompt and padding."""
    import torch
    from reward_sentiment import reward_fn

    texts = []
    for query, prompt in zip(queries, prompts, strict=True):
        for token in SPECIAL:
            query, prompt = query.replace(token, ""), prompt.replace(token, "")
        texts.append(query.split(prompt, 1)[1])
    return torch.tensor(reward_fn([], texts, []))


def command(arguments: Any, task: learn.Task) -> list[str]:
    """The command line of its train_ppo."""
    folder, stories = arguments.folder, arguments.task == "stories"
    options = {
        "pretrain": folder / "policy",
        "critic_pretrain": folder / "critic",
        **(
            {"remote_rm_url": Path(__file__).resolve()}
            if stories
            else {"reward_pretrain": folder / "critic"}
        ),
        "prompt_data": folder / "prompts.jsonl",
        "input_key": "with_bos",
        "max_samples": arguments.rollouts * task.samples,
        "rollout_batch_size": task.samples,
        "micro_rollout_batch_size": task.samples,
        "train_batch_size": task.mini_batch,
        "micro_train_batch_size": task.mini_batch,
        "max_epochs": task.epochs,
        "generate_max_len": task.new_tokens,
        "zero_stage": 2,
        "actor_learning_rate": task.actor_rate,
        "critic_learning_rate": task.critic_rate,
        "init_kl_coef": task.kl,
        "lambd": task.lambd,
        "value_clip": task.value_clip,
        "seed": arguments.seed,
        "save_path": arguments.save_path,
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [
        "train_ppo",
        *given,
        "--reward_clip_range",
        str(-int(learn.NO_CLIP)),
        str(int(learn.NO_CLIP)),
    ]


def main() -> None:
    """Load, train, save."""
    arguments = learn.options(__doc__)
    task = learn.TASKS[arguments.task]
    curve = learn.Curve(task)

    turns.use_threads()
    openrlhf_step.describe_group_of_one()
    openrlhf_step.stub_gpu_packages()
    openrlhf_step.move_cuda_to_cpu()
    from openrlhf.trainer.ppo_trainer import PPOTrainer
    from openrlhf.trainer.ppo_utils.experience_maker import NaiveExperienceMaker

    openrlhf_step.replace_fused_adam()
    fit, make, train = (
        PPOTrainer.fit,
        NaiveExperienceMaker.make_experience_list,
        PPOTrainer.ppo_train,
    )
    rewards: list[float] = []

    def timed_fit(*args: Any, **kwargs: Any) -> None:
        curve.start()
        fit(*args, **kwargs)

    def watched_experience(*args: Any, **kwargs: Any) -> Any:
        experiences = make(*args, **kwargs)
        rewards[:] = [
            reward for experience in experiences for reward in experience.info["reward"].tolist()
        ]
        return experiences

    def watched_training(*args: Any, **kwargs: Any) -> Any:
        status = train(*args, **kwargs)
        curve.step(sum(rewards) / len(rewards))
        return status

    PPOTrainer.fit, PPOTrainer.ppo_train = timed_fit, watched_training
    NaiveExperienceMaker.make_experience_list = watched_experience
    sys.argv = command(arguments, task)
    runpy.run_module("openrlhf.cli.train_ppo", run_name="__main__")


if __name__ == "__main__":
    main()
