"""The memory estimate of today beside peaks that were measured on a GPU.

    python benchmarks/memory_gpu.py

Nothing is loaded or measured: the runs are those of ``benchmarks/gpu``, their peaks are in
``results/2026-11-27-h200.md``, and the estimate is the one of ``--dry_run``. A cell has GiB estimated / measured, and
the measured over the estimated.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig

from benchmarks.gpu.models import SHAPES
from openppo.build.memory.sizing import estimated_ppo
from openppo.config import TrainPPOConfig, from_options

RESULTS = Path(__file__).parent / "results" / "2026-11-27-h200.md"
PHASES = ("generation", "experience", "training")
GRPO = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 8, "init_kl_coef": 0.0}
SMALL = {"micro_train_tokens": 8192}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO, as it is": ("0.5b", {}),
    "PPO, by lengths": ("0.5b", {}),
    "PPO, --cuda_graphs off": ("0.5b", {"cuda_graphs": "off"}),
    "GRPO, 7B LoRA": ("7b", {"lora_rank": 16, "gradient_checkpointing": True} | GRPO),
    "base": ("small", SMALL),
    "mask": ("small", SMALL),
    "graphs off": ("small", SMALL | {"cuda_graphs": "off"}),
    "compile": ("small", SMALL),
    "checkpointing": ("small", SMALL | {"gradient_checkpointing": True}),
    "EMA": ("small", SMALL | {"ema_beta": 0.992}),
    "offload_idle": ("small", SMALL | {"offload_idle": True}),
    "ZeRO-0": ("small", SMALL | {"zero_stage": 0}),
    "ZeRO-3": ("small", SMALL | {"zero_stage": 3}),
    "LoRA": ("small", SMALL | {"lora_rank": 16}),
    "GRPO": ("small", SMALL | GRPO),
    "float32": ("small", SMALL | {"bf16": False}),
    "resume whole": ("small", SMALL),
}
"""Shape and options of each run with measured peaks, without repeated ones."""


def measured() -> dict[str, dict[str, float]]:
    """Peaks of the last step of each run in GiB, by phase."""
    peaks: dict[str, dict[str, float]] = {}
    columns: list[str] = []
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("run", "variant"):
            columns = cells
        pairs = zip(columns, cells, strict=False)
        of_phases = {
            column.split()[0]: float(cell.split()[0])
            for column, cell in pairs
            if re.fullmatch(r"[\d.]+ / [\d.]+", cell)
        }
        if of_phases:
            peaks[cells[0]] = of_phases
    return peaks


def estimated(shape_name: str, options: dict[str, Any]) -> dict[str, int]:
    """Bytes by phase of a run of ``benchmarks/gpu`` on one H200."""
    shape = SHAPES[shape_name]
    model = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        attention_bias=True,
        tie_word_embeddings=shape.tied,
    )
    common = {
        "pretrain": "model",
        "prompt_data": "prompts",
        "reward_fn": "reward.py",
        "rollout_batch_size": shape.n_responses // options.get("n_samples_per_prompt", 1),
        "train_batch_size": shape.n_responses,
        "prompt_max_len": shape.prompt,
        "generate_max_len": shape.response,
        "micro_train_tokens": 32768,
        "micro_rollout_tokens": 32768,
        "bf16": True,
        "dry_run": "1x139.8",
    }
    config = from_options(TrainPPOConfig, **common | options)
    data: Any = SimpleNamespace(prompts=[], documents=[], longest=shape.prompt + shape.response)
    strategy: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    configs = {"--pretrain": model, "--ref_pretrain": model}
    _, estimate = estimated_ppo(config, data, strategy, configs)
    assert estimate is not None
    return estimate.phases


def main() -> None:
    """Print a row for each run."""
    print(f"| run | {' | '.join(PHASES)} |")
    print("| --- " * (1 + len(PHASES)) + "|")
    peaks = measured()
    for name, run in RUNS.items():
        phases = estimated(*run)
        cells = []
        for phase in PHASES:
            gib = phases[phase] / 2**30
            peak = peaks[name].get(phase)
            cells.append(f"{gib:.2f} / {peak:.2f}, {peak / gib:.2f}" if peak else "-")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
