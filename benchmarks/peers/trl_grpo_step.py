"""TRL's GRPOTrainer as a participant: groups of responses to one prompt.

Generation is its _generate(), experience the rest of _generate_and_score_completions(), training what is left of a
step. With ``--dtype bf16`` its parameters are bf16, without float32 master weights, which is its fastest.
"""

import os
import time
from typing import Any

import turns

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
LONGEST_RUN = 1000  # iterations: the trainer wants to know how many there will be


def load(arguments: Any, clock: turns.Turns) -> Any:
    """A trainer whose steps are turns."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seen: dict[str, float] = {}

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            generated = super()._generate(*args, **kwargs)
            seen["generation"] = time.perf_counter() - start
            seen["tokens"] = sum(map(len, generated[1]))
            return generated

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            scored = super()._generate_and_score_completions(*args, **kwargs)
            seen["scored"] = time.perf_counter() - start
            return scored

    class InTurns(TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not clock.wait()
            seen["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            took, scored = time.perf_counter() - seen["began"], seen["scored"]
            experience = scored - seen["generation"]
            phases = {
                "generation": seen["generation"],
                "experience": experience,
                "training": took - scored,
            }
            clock.report(**phases, tokens=seen["tokens"])

    model = turns.policy(arguments)
    prompts: list[Any] = turns.group_prompts(arguments.workload)
    prompts: list[Any] = turns.group_prompts(arguments.workload)
    if arguments.workload == "w5":
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    config = GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=turns.BATCH // arguments.micro,
        num_generations=turns.GROUP,
        max_completion_length=turns.NEW_TOKENS[arguments.workload],
        beta=arguments.kl,
        use_cpu=True,
        bf16=False,
        max_steps=LONGEST_RUN,
        learning_rate=1e-6,
        report_to="none",
        save_strategy="no",
        logging_steps=LONGEST_RUN,
        disable_tqdm=True,
        gradient_checkpointing=False,
        temperature=1.0,
        top_k=0,
        seed=1,
    )
    return Timed(
        model=AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32 if arguments.dtype == "float32" else torch.bfloat16
        ),
        args=config,
        reward_funcs=lambda completions, **_: [float(len(str(text)) % 7) for text in completions],
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[InTurns()],
    )


def main() -> None:
    """Load, then take a turn for each step."""
    parser = turns.options(__doc__)
    parser.add_argument(
        "--micro", type=int, default=turns.MICRO_TRAIN_BATCH, help="per_device_train_batch_size"
    )
    arguments = parser.parse_args()
    clock = turns.Turns()

    import torch
    import transformers
    import trl

    turns.use_threads()
    trainer = load(arguments, clock)
    clock.ready(trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
