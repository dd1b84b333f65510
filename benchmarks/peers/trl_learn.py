"""TRL 1.12.0 as a participant of ``benchmarks/learning.py``: its PPOTrainer or its GRPOTrainer.

Its PPO has one learning rate and does not clip gradients: it is given an optimizer with two rates, which clips those of
policy and critic to a norm of 1, and its weight of the value loss is 1. It takes a reward model only: for the stories
its ``get_reward`` calls the function.
"""

import math
import os
from typing import Any

import learn
import turns

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def shared_options(arguments: Any, task: learn.Task) -> dict[str, Any]:
    """Arguments of both trainers. A micro-batch is a mini-batch: then both take the mean over its tokens."""
    return {
        "output_dir": arguments.save_path,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": learn.LEAST_RATE},
        "learning_rate": task.actor_rate,
        "adam_beta1": learn.ADAM_BETAS[0],
        "adam_beta2": learn.ADAM_BETAS[1],
        "bf16": False,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "temperature": 1.0,
        "seed": arguments.seed,
        "disable_tqdm": True,
    }


def optimizer_of(policy: Any, critic: Any, task: learn.Task) -> Any:
    """Adam with a rate for each, which clips the gradient of each."""
    import torch

    groups = [(policy, task.actor_rate), (critic, task.critic_rate)]
    adam = torch.optim.AdamW(
        [{"params": list(model.parameters()), "lr": rate} for model, rate in groups],
        betas=learn.ADAM_BETAS,
        weight_decay=0.0,
    )

    def clip(*_: Any) -> None:
        for model, _rate in groups:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    adam.register_step_pre_hook(clip)
    return adam


def load_ppo(arguments: Any, task: learn.Task, tokenizer: Any) -> Any:
    """Its PPOTrainer."""
    import trl.experimental.ppo.ppo_trainer as module
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    rows = learn.prompts(arguments.folder / "prompts.jsonl", arguments.rollouts * task.samples)
    data = Dataset.from_dict({"input_ids": [row["ids"] for row in rows]})
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(arguments.folder / "policy") for _ in range(2)
    )
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(arguments.folder / "critic")
        for _ in range(2)
    )
    if arguments.task == "stories":
        module.get_reward = with_function(module.get_reward, reward, tokenizer)
    config = PPOConfig(
        **shared_options(arguments, task),
        warmup_steps=0,  # they are rollouts here, and the first would have a rate of 0
        per_device_train_batch_size=task.samples,  # num_mini_batches then cuts it, with an optimizer step for each
        num_mini_batches=task.samples // task.mini_batch,
        num_ppo_epochs=task.epochs,
        local_rollout_forward_batch_size=task.samples,
        response_length=task.new_tokens,
        total_episodes=len(rows),
        stop_token="eos",
        num_sample_generations=0,
        logging_steps=1,
        kl_coef=task.kl,
        lam=task.lambd,
        cliprange_value=task.value_clip,
        vf_coef=1.0,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        optimizers=(optimizer_of(policy, critic, task), None),
    )


def with_function(get_reward: Any, reward: Any, tokenizer: Any) -> Any:
    """Its get_reward, with the sentiment of the responses in place of the model ``reward``."""
    import torch
    from reward_sentiment import reward_fn

    def scored(model: Any, sequences: Any, pad_token_id: int, width: int) -> tuple[Any, Any, Any]:
        if model is not reward:
            return get_reward(model, sequences, pad_token_id, width)
        texts = tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)
        return None, torch.tensor(reward_fn([], texts, [])), None

    return scored


def load_grpo(arguments: Any, task: learn.Task, tokenizer: Any) -> Any:
    """Its GRPOTrainer."""
    from datasets import Dataset
    from reward_sentiment import reward_fn
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import GRPOConfig, GRPOTrainer

    rows = learn.prompts(
        arguments.folder / "prompts.jsonl", arguments.rollouts * task.samples // learn.GROUP
    )
    model = AutoModelForSequenceClassification.from_pretrained(arguments.folder / "critic")

    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        asked = tokenizer(prompts)["input_ids"]
        return learn.scores(model, [[*a, *b] for a, b in zip(asked, completion_ids, strict=True)])

    def sentiment(completions: list[str], **_: Any) -> list[float]:
        return reward_fn([], completions, [])

    steps = arguments.rollouts * task.optimizer_steps
    config = GRPOConfig(
        **shared_options(arguments, task),
        warmup_steps=math.ceil(learn.WARM_UP * steps),
        per_device_train_batch_size=task.mini_batch,
        steps_per_generation=task.samples // task.mini_batch,
        num_iterations=task.epochs,
        num_generations=learn.GROUP,
        max_completion_length=task.new_tokens,
        max_steps=steps,
        logging_steps=task.optimizer_steps,
        beta=learn.BETA,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.folder / "policy"),
        args=config,
        reward_funcs=sentiment if arguments.task == "stories" else score,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [row["input"] for row in rows]}),
    )


def main() -> None:
    """Load, train, save."""
    arguments = learn.options(__doc__)
    task = learn.TASKS[arguments.task]
    curve = learn.Curve(task)

    from transformers import AutoTokenizer

    turns.use_threads()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / "policy", padding_side="left")
    load, key = {"ppo": (load_ppo, "objective/scores"), "grpo": (load_grpo, "reward")}[
        arguments.algorithm
    ]
    trainer = load(arguments, task, tokenizer)
    log = trainer.log

    def logged(logs: dict[str, float], *rest: Any) -> None:
        log(logs, *rest)
        if key in logs:
            curve.step(logs[key])

    trainer.log = logged
    curve.start()
    trainer.train()
    getattr(trainer, "policy_model", trainer.model).save_pretrained(arguments.save_path)


if __name__ == "__main__":
    main()
