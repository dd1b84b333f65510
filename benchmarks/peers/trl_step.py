"""TRL 1.12.0 as a participant, the last release with PPOTrainer.

Generation is its batch_generation(); experience goes from there to the first forward of training, and training from
there to its log().
With ``--dtype bf16`` its parameters are bf16, without float32 master weights, which is its fastest.
"""

import json
import os
import time
from contextlib import suppress
from typing import Any

import turns

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
LONGEST_RUN = 1000  # iterations: the trainer wants to know how many there will be


class _NoTurnLeftError(Exception):
    """Leaves the trainer's loop."""


def load(arguments: Any) -> Any:
    """A trainer for ``LONGEST_RUN`` iterations."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    folder = arguments.assets / arguments.workload
    dtype = torch.float32 if arguments.dtype == "float32" else torch.bfloat16

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=dtype)

    def scores() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            folder / "reward", num_labels=1, dtype=dtype
        )

    lines = (arguments.assets / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["ids"] for line in lines]
    prompts = Dataset.from_dict({"input_ids": rows})
    config = PPOConfig(
        output_dir="unused",
        per_device_train_batch_size=turns.MICRO_TRAIN_BATCH,
        gradient_accumulation_steps=turns.BATCH // turns.MICRO_TRAIN_BATCH,
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=arguments.rollout_micro,
        response_length=turns.NEW_TOKENS[arguments.workload],
        stop_token="eos",
        temperature=1.0,
        total_episodes=turns.BATCH * LONGEST_RUN,
        learning_rate=1e-6,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        seed=1,
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=config,
        processing_class=AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
        model=policy(),
        ref_model=policy(),
        reward_model=scores(),
        value_model=scores(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(8)),
    )


def response_tokens(sequences: Any, width: int, eos: int) -> int:
    """Tokens up to the first EOS, of sequences whose responses begin at ``width``."""
    import torch

    ended = sequences[:, width:] == eos
    whole = torch.tensor(ended.shape[1])
    return int(torch.where(ended.any(1), ended.int().argmax(1) + 1, whole).sum())


def main() -> None:
    """Load, then take a turn between two calls of the trainer's log."""
    parser = turns.options(__doc__)
    parser.add_argument(
        "--rollout_micro",
        type=int,
        default=turns.BATCH,
        help="its local_rollout_forward_batch_size",
    )
    arguments = parser.parse_args()
    clock = turns.Turns()

    import torch
    import transformers
    import trl
    import trl.experimental.ppo.ppo_trainer as module

    turns.use_threads()
    trainer = load(arguments)
    generate, forward = module.batch_generation, module.forward
    seen: dict[str, float] = {}

    def timed_generation(model: Any, queries: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        sequences, logits = generate(model, queries, *args, **kwargs)
        seen["generated"] = time.perf_counter()
        seen["generation"] = seen["generated"] - start
        seen["tokens"] = response_tokens(
            sequences, queries.shape[1], trainer.processing_class.eos_token_id
        )
        return sequences, logits

    def watched_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is trainer.model:
            seen.setdefault("training_began", time.perf_counter())
        return forward(model, *args, **kwargs)

    def log(*_: Any, **__: Any) -> None:
        began = seen["training_began"]
        clock.report(
            generation=seen["generation"],
            experience=began - seen["generated"],
            training=time.perf_counter() - began,
            tokens=seen["tokens"],
        )
        seen.clear()
        if not clock.wait():
            raise _NoTurnLeftError

    module.batch_generation, module.forward, trainer.log = timed_generation, watched_forward, log
    clock.ready(trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__)
    if clock.wait():
        with suppress(_NoTurnLeftError):
            trainer.train()


if __name__ == "__main__":
    main()
