"""Checks of asynchronous runs and of runs with several tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from openppo.config.agents import FORMS

if TYPE_CHECKING:
    from openppo.config.train_ppo import TrainPPOConfig


def async_problems(config: TrainPPOConfig) -> Iterator[str]:
    """Yield messages about options that cannot work with asynchronous rollouts or ``--tasks``."""
    asynchronous = config.orchestrator
    samples_apart = asynchronous.rollout_ranks > 0
    if config.evaluation.val_only and samples_apart:
        yield "--val_only evaluates on the ranks that train, none of which is to spare: leave out --rollout_ranks."
    if asynchronous.tasks is not None:
        yield from _task_problems(config)
    if not asynchronous.is_async:
        return

    if config.generation.rollout_engine == "vllm" and asynchronous.running_requests == "continue":
        yield "--rollout_engine vllm cannot continue requests with new weights: use --running_requests drain."
    pieces = config.generation.vllm_tensor_parallel_size
    if pieces > 1 and samples_apart:
        yield f"--vllm_tensor_parallel_size {pieces}: --rollout_ranks work each by itself; leave one of them out."
    if config.lora.load_in_4bit and samples_apart:
        yield "--load_in_4bit keeps no whole weights that could be sent to --rollout_ranks: leave one of them out."
    # Any task may have held-out prompts.
    may_evaluate = not config.nothing_held_out or asynchronous.tasks is not None
    if config.ppo.ema_beta is not None and not samples_apart and may_evaluate:
        yield "--ema_beta evaluates the average, and requests under way would use it too: add --rollout_ranks."


def _task_problems(config: TrainPPOConfig) -> Iterator[str]:
    options = {
        "prompt_data": config.data.prompt_data,
        "eval_data": config.evaluation.eval_data,
        "eval_reward_fn": config.evaluation.eval_reward_fn,
    }
    options |= {form: vars(config.agents)[form] for form in FORMS}
    options |= dict.fromkeys(config.rewards.names(), "given")
    names = [name for name, value in options.items() if value]
    if names:
        yield f"--tasks says what each task is, its {names[0]} too: leave it out of the command line."
    if config.ppo.max_steps is None:
        yield "--tasks plays tasks in given ratios, however many rows they have: say --max_steps."
