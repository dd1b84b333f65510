"""One side of ``benchmarks/gpu.py`` in a process of its own: steps of OpenPPO, or plain transformers on equal work.

The last line on stdout is ``RESULT`` with seconds (medians), tokens, bytes and counts as JSON. Plain transformers is
``generate`` with its dynamic cache, then a training step: forwards, cross entropy of the response tokens, backwards
and fused AdamW on the bf16 weights, without float32 masters; with LoRA through peft.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_models
import turns

GIB = 2**30
PHASES = ("generation", "experience", "training")


def reward_fn(response: str) -> float:
    """Something that differs from one response to another."""
    return float(len(response) % 7)


def seconds(work: Callable[[], Any]) -> float:
    """Of one call, with the GPU's work."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def peak_gib() -> float:
    """The most that this process had of the GPU's memory, or of the machine's without a GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return turns.peak_megabytes() * 1e6 / GIB


def take_peak() -> float:
    """``peak_gib`` since the last call."""
    import torch

    peak = peak_gib()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return peak


def n_adapters(model: Any) -> int:
    """Parameters of LoRA's matrices."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)


def run_openppo(arguments: argparse.Namespace, shape: gpu_models.Shape, folder: str) -> dict[str, Any]:
    """Whole steps through the trainer, then the prefill alone."""
    from openppo.config import TrainPPOConfig, from_options
    from openppo.trainer import build_ppo_trainer, quiet_libraries
    from openppo.types import SamplingParams

    quiet_libraries()
    own = shape.options[arguments.tuning]
    given = {
        "pretrain": str(arguments.assets / "policy"),
        "prompt_data": str(arguments.assets / "prompts.jsonl"),
        "input_key": "input",
        "reward_fn": __file__,
        "prompt_max_len": shape.prompt,
        "generate_max_len": shape.response,
        "rollout_batch_size": shape.n_responses // own.get("n_samples_per_prompt", 1),
        "train_batch_size": shape.n_responses,
        "num_episodes": arguments.warm_up + arguments.steps,
        "bf16": True,
        "save_path": folder,
        "cuda_graphs": arguments.cuda_graphs,
    }
    trainer = build_ppo_trainer(from_options(TrainPPOConfig, **given, **own))
    measured, loading = [], peak_gib()  # the trainer measures each phase anew
    for turn, prompts in zip(range(arguments.warm_up + arguments.steps), trainer.prompt_batches(), strict=False):
        metrics = trainer.step(prompts)
        print(f"step {turn}:", {key: round(value, 4) for key, value in metrics.items()}, flush=True)
        if metrics["response_length"] != shape.response or metrics["skipped_steps"]:
            sys.exit(f"responses of {metrics['response_length']} tokens, {metrics['skipped_steps']} skipped steps")
        measured.append(metrics)
    trainer.update.set_training(False)
    rows = [prompt.token_ids for prompt in prompts for _ in range(own.get("n_samples_per_prompt", 1))]
    with trainer.source.with_weights():
        prefill = [
            seconds(
                lambda: trainer.components.engine.generate(rows, SamplingParams(1, 1.0, 1.0, None), range(len(rows)))
            )
            for _ in range(arguments.steps)
        ]
    estimate = trainer.components.estimate
    peaks = {name: max(m.get(f"memory/{name}_peak_gib", 0.0) for m in measured) for name in PHASES}
    counted = {
        key: statistics.median(metrics[f"time/{key}_s"] for metrics in measured[arguments.warm_up :])
        for key in ("generation", "scoring", "experience", "training", "step")
    }
    counted["adapters"] = n_adapters(trainer.components.actor.module)
    trainer.close()
    return counted | {
        "prefill": statistics.median(prefill),
        "peak_gib": max(loading, *peaks.values(), peak_gib()),
        "peaks": {name: peak for name, peak in peaks.items() if peak > 0},
        "estimates": {name: estimate.phases[name] / GIB for name in PHASES} if estimate else {},
    }


def run_transformers(arguments: argparse.Namespace, shape: gpu_models.Shape, folder: str) -> dict[str, Any]:
    """``generate``, then training steps on what it sampled."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.backends.cuda.enable_cudnn_sdp(False)  # as OpenPPO: else each new length of the cache gets a plan of its own
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = shape.options[arguments.tuning]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.assets / "policy", dtype=torch.bfloat16).to(device)
    if arguments.tuning == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options["lora_rank"], target_modules="all-linear"))
    lines = (arguments.assets / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = torch.tensor([json.loads(line)["ids"] for line in lines], device=device)  # (B, prompt)

    @torch.no_grad()
    def generate(new_tokens: int) -> Any:
        sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        ends = {"max_new_tokens": new_tokens, "eos_token_id": gpu_models.EOS, "pad_token_id": gpu_models.PAD}
        config = GenerationConfig(**sampling, **ends)
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    model.eval()
    generate(2)
    prefill = [seconds(lambda: generate(1)) for _ in range(arguments.steps)]
    kept: list[Any] = []
    generation = [seconds(lambda: kept.append(generate(shape.response))) for _ in range(arguments.steps)]
    sequences = kept[-1]  # (B, prompt + response)
    if sequences.shape[1] != shape.prompt + shape.response or (sequences == gpu_models.EOS).any():
        sys.exit(f"sequences {tuple(sequences.shape)} with EOS: the weights were to prevent it")
    peaks = {"generation": take_peak()}
    step = training_step(model, sequences, shape.prompt, options)
    training = [seconds(step) for _ in range(arguments.warm_up + arguments.steps)][arguments.warm_up :]
    medians = {"generation": generation, "prefill": prefill, "training": training}
    peaks["training"] = take_peak()
    memory = {"peak_gib": max(peaks.values()), "peaks": peaks if device == "cuda" else {}, "estimates": {}}
    return {key: statistics.median(times) for key, times in medians.items()} | {"adapters": n_adapters(model)} | memory


def training_step(model: Any, sequences: Any, n_prompt: int, options: dict[str, Any]) -> Callable[[], None]:
    """An optimizer step on all ``sequences`` (B, L), in OpenPPO's micro-batches."""
    import torch

    if options.get("gradient_checkpointing"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    labels = sequences.clone()
    labels[:, :n_prompt] = -100
    micro = options["micro_train_batch_size"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        for start in range(0, len(sequences), micro):
            rows = slice(start, start + micro)
            loss = model(input_ids=sequences[rows], labels=labels[rows], use_cache=False).loss
            (loss * micro / len(sequences)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad()

    return step


def main() -> None:
    """Run one side and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["OpenPPO", "transformers"], required=True)
    parser.add_argument("--assets", type=Path, required=True, help="the folder that gpu_models.py wrote")
    parser.add_argument("--shape", choices=list(gpu_models.SHAPES), required=True)
    parser.add_argument("--tuning", choices=["full", "lora"], required=True)
    parser.add_argument("--warm_up", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cuda_graphs", default="auto")
    arguments = parser.parse_args()
    run = run_openppo if arguments.side == "OpenPPO" else run_transformers
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments, gpu_models.SHAPES[arguments.shape], folder)
    import torch

    if torch.backends.cuda.cudnn_sdp_enabled():
        sys.exit(f"{arguments.side} ran with cuDNN attention, which plans anew for each length: no fair figure")
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
