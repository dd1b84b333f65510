"""Estimated memory per GPU, for models of 0.5B to 70B on 1 to 64 GPUs.

    python benchmarks/memory_table.py

Nothing is loaded or measured: the models are made from these numbers on the meta device, and the estimator is that of
``--dry_run``. A run has an actor, a critic, a reward model and a reference, all of one size.
"""

from transformers import LlamaConfig, Qwen2Config

from openppo.build.memory.estimate import Machine
from openppo.build.memory.ppo_estimate import Lengths, estimate_ppo
from openppo.config import TrainPPOConfig, from_options
from openppo.config.resolved import Resolved
from openppo.models.size import model_size

GIB = 2**30
GPUS = (1, 2, 4, 8, 16, 32, 64)
ROOM = 80  # GiB
QWEN = {"vocab_size": 152064, "tie_word_embeddings": False}
TIED = {"vocab_size": 151936, "tie_word_embeddings": True}
MODELS = {  # hidden, intermediate, layers, heads, key-value heads
    "0.5B": (Qwen2Config, (896, 4864, 24, 14, 2), TIED),
    "1.5B": (Qwen2Config, (1536, 8960, 28, 12, 2), TIED),
    "3B": (Qwen2Config, (2048, 11008, 36, 16, 2), TIED),
    "7B": (Qwen2Config, (3584, 18944, 28, 28, 4), QWEN),
    "14B": (Qwen2Config, (5120, 13824, 48, 40, 8), QWEN),
    "32B": (Qwen2Config, (5120, 27648, 64, 40, 8), QWEN),
    "70B": (
        LlamaConfig,
        (8192, 28672, 80, 64, 8),
        {"vocab_size": 128256, "tie_word_embeddings": False},
    ),
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
OPTIONS = {
    "bf16": True,
    "gradient_checkpointing": True,
    "rollout_batch_size": 512,
    "train_batch_size": 128,
}
LENGTHS = Lengths(shortest_prompt=100, longest_prompt=1024)


def config(zero_stage: int) -> TrainPPOConfig:
    """Of a run with the default micro-batches and lengths: 8 samples to generate, 4 to train, 1024 + 1024 tokens."""
    paths = {"pretrain": "model", "prompt_data": "prompts", "reward_pretrain": "reward"}
    return from_options(TrainPPOConfig, zero_stage=zero_stage, **paths, **OPTIONS)


def table(name: str) -> list[str]:
    """Rows of stages, columns of GPUs; a cell has the peak of a step in GiB."""
    kind, numbers, more = MODELS[name]
    model = kind(**dict(zip(SIZES, numbers, strict=True)), **more)
    policy, scalar = model_size(model), model_size(model, scalar=True)
    sizes = {"reward model": scalar, "critic": scalar, "actor": policy, "reference": policy}
    lines = [f"### {name}: {policy.n_parameters / 1e9:.2f} billion parameters", ""]
    lines.append("| ZeRO | " + " | ".join(map(str, GPUS)) + " |")
    lines.append("| --- " * (len(GPUS) + 1) + "|")
    for stage in (1, 2, 3):
        cells = []
        for n in GPUS:
            options = config(stage)
            machine = Machine(options.deepspeed, n, memory=ROOM * GIB)
            estimate = estimate_ppo(
                options, Resolved.of(options), LENGTHS, sizes=sizes, machine=machine
            )
            peak = estimate.peaks["step"] / GIB
            cells.append(f"{peak:.0f}" if peak <= ROOM else f"({peak:.0f})")
        lines.append(f"| {'0, 1' if stage == 1 else stage} | {' | '.join(cells)} |")
    loading = estimate.phases["loading"] / GIB
    return [
        *lines,
        "",
        f"Loading with ZeRO-3 on 64: {loading:.0f}. A checkpoint: {estimate.checkpoint / GIB:.0f}.",
        "",
    ]


def main() -> None:
    """Print all tables."""
    for name in MODELS:
        print("\n".join(table(name)), flush=True)


if __name__ == "__main__":
    main()
