"""OpenPPO's GRPO steps, one for each line on stdin; JSON lines on stdout. Started by peers.py."""

import sys
import time

from benchmarks.gpu.turns import GROUP, answer, answers, folders


def main() -> None:
    """Load, then make steps."""
    stream, began = answers(), time.perf_counter()
    import torch

    from benchmarks.gpu.assets import seconds, shape_of
    from openppo.config import TrainPPOConfig, from_options
    from openppo.trainer import build_ppo_trainer, quiet_libraries

    quiet_libraries()
    on_gpu, shape = torch.cuda.is_available(), shape_of("0.5b")
    assets, folder = folders()
    (folder / "reward.py").write_text(
        "def reward_fn(response):\n    return float(len(response) % 7)\n"
    )
    options = {
        "pretrain": str(assets / "policy"),
        "prompt_data": str(assets / "prompts.jsonl"),
        "input_key": "input",
        "reward_fn": str(folder / "reward.py"),
        "prompt_max_len": shape.prompt,
        "generate_max_len": shape.response,
        "rollout_batch_size": shape.n_responses // GROUP,
        "n_samples_per_prompt": GROUP,
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0.0,
        "train_batch_size": shape.n_responses,
        "num_episodes": 100,
        "bf16": True,
        "save_path": str(folder / "model"),
    }
    if on_gpu:
        options["micro_train_tokens"] = options["micro_rollout_tokens"] = (
            16384  # the other side is on the GPU, too
        )
    trainer = build_ppo_trainer(from_options(TrainPPOConfig, **options))
    batches, steps = trainer.prompt_batches(), list[dict[str, float]]()
    attention = trainer.components.actor.module.model.config._attn_implementation
    answer(
        stream, ready_s=time.perf_counter() - began, torch=torch.__version__, attention=attention
    )
    for _ in sys.stdin:
        total = seconds(lambda: steps.append(trainer.step(next(batches))))
        metrics = steps[-1]
        times = {
            phase: metrics[f"time/{phase}_s"] for phase in ("generation", "experience", "training")
        }
        peaks = [
            value
            for name, value in metrics.items()
            if name.startswith("memory/") and name.endswith("_peak_gib")
        ]
        n_tokens = metrics["response_length"] * shape.n_responses
        answer(stream, total=total, **times, tokens=n_tokens, peak_gib=max(peaks, default=0.0))
        if on_gpu:
            torch.cuda.empty_cache()
    trainer.close()


if __name__ == "__main__":
    main()
