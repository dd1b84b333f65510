"""TRL's GRPOTrainer with transformers' generation, one step for each line on stdin. Started by peers.py."""

import json
import sys
import time
from typing import Any

from benchmarks.gpu.rows import DRY
from benchmarks.gpu.turns import GROUP, answer, answers, folders

MICRO_BATCH = 4 if DRY else 16


def main() -> None:
    """Load, then make steps."""
    stream, began = answers(), time.perf_counter()
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.gpu.assets import shape_of

    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # as OpenPPO: it would plan anew for each length of the cache
    on_gpu, shape, times = torch.cuda.is_available(), shape_of("0.5b"), dict[str, float]()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = now()
            generated = super()._generate(*args, **kwargs)
            times["generation"] = now() - start
            times["tokens"] = sum(map(len, generated[1]))
            return generated

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = now()
            scored = super()._generate_and_score_completions(*args, **kwargs)
            times["before training"] = now() - start
            return scored

    class InTurns(TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if on_gpu:
                torch.cuda.empty_cache()
            control.should_training_stop = not sys.stdin.readline()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            times["began"] = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            total = now() - times["began"]
            answer(
                stream,
                total=total,
                generation=times["generation"],
                experience=times["before training"] - times["generation"],
                training=total - times["before training"],
                tokens=times["tokens"],
                peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
            )

    assets, folder = folders()
    prompts = [
        json.loads(line)["input"] for line in (assets / "prompts.jsonl").read_text().splitlines()
    ]
    config = GRPOConfig(
        output_dir=str(folder / "unused"),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=shape.n_responses // MICRO_BATCH,
        num_generations=GROUP,
        max_completion_length=shape.response,
        beta=0.0,
        use_cpu=not on_gpu,
        bf16=False,  # its weights are bfloat16 without float32 master weights, which is its fastest
        max_steps=100,
        learning_rate=1e-6,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        gradient_checkpointing=False,
        temperature=1.0,
        top_k=0,
        seed=1,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(assets / "policy", dtype=torch.bfloat16),
        args=config,
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        processing_class=AutoTokenizer.from_pretrained(assets / "policy", padding_side="left"),
        train_dataset=Dataset.from_dict({"prompt": prompts * 20}),
        callbacks=[InTurns()],
    )
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    attention = trainer.model.config._attn_implementation
    answer(stream, ready_s=time.perf_counter() - began, **versions, attention=attention)
    trainer.train()


if __name__ == "__main__":
    main()
