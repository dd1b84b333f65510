"""Models and prompts of ``benchmarks/gpu.py``: shaped like Qwen2.5, with random weights that never sample EOS.

    python benchmarks/peers/gpu_models.py SHAPE FOLDER

Writes a policy in bf16 with a tokenizer of whole words, and prompts.jsonl with prompts of one length. Every response
runs to its limit, so that all libraries do the same work. The weights alone do it: all embeddings share the value of
one residual channel, which no layer writes to, and the output row of EOS reads that channel only, with a weight so
negative that its probability is 0 in float32. No prompt has EOS, so with tied embeddings its row is never an input.

The class is Llama with biases in attention, which is Qwen2 with one vector more in a layer: transformers 5 gives a
Qwen2 folder the tokenizer of Qwen2, whatever tokenizer lies there.
"""

import argparse
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

N_WORDS = 4096  # of the tokenizer; a model may have more rows, which are sampled and decode to nothing
PAD, BOS, EOS = 0, 1, 2
SHARED, EOS_WEIGHT = 0.3, -30000.0
"""The shared channel's value, and the weight with which EOS reads it."""


@dataclass(frozen=True)
class Shape:
    """A model, the lengths of its sequences in tokens, and options of train_ppo by tuning.

    ``options`` were chosen by the estimate of ``--dry_run`` for one GPU of 139 GiB; ``notes`` say what they leave out.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    prompt: int = 1024
    response: int = 1024
    n_responses: int = 64
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def has_critic(self) -> dict[str, bool]:
        """By tuning."""
        return {tuning: "advantage_estimator" not in options for tuning, options in self.options.items()}


_CHECKPOINTED = {"gradient_checkpointing": True, "micro_train_batch_size": 4}
_NO_CRITIC = {"advantage_estimator": "rloo", "n_samples_per_prompt": 2, "init_kl_coef": 0.0}
LORA = {"lora_rank": 16}
SHAPES = {
    "tiny": Shape(
        *(64, 2, 4, 2, 128, 4096, True),
        prompt=24,
        response=16,
        n_responses=8,
        options={"full": {"micro_train_batch_size": 4}, "lora": {"micro_train_batch_size": 4} | LORA},
    ),
    "0.5b": Shape(
        *(896, 24, 14, 2, 4864, 151936, True),
        options={"full": {"micro_train_batch_size": 8}, "lora": {"micro_train_batch_size": 8} | LORA},
    ),
    "7b": Shape(
        *(3584, 28, 28, 4, 18944, 152064, False),
        options={"full": _CHECKPOINTED | _NO_CRITIC | {"micro_train_batch_size": 2}, "lora": _CHECKPOINTED | LORA},
        notes={
            "full": "No critic (rloo, 32 prompts x 2 responses, whose prompts are read once) and no reference "
            "(--init_kl_coef 0): even with a reference alone one GPU of 139 GiB is too small by estimate, and "
            "--adam_offload wants 128 GiB of host memory. Activations are recomputed (--gradient_checkpointing).",
            "lora": "Activations are recomputed (--gradient_checkpointing).",
        },
    ),
}


def build(shape: Shape, folder: Path) -> None:
    """Write everything to ``folder``, which is not there before all of it is."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    choose = random.Random(0)
    with open(unfinished / "prompts.jsonl", "w", encoding="utf-8") as file:
        for _ in range(shape.n_responses):
            ids = [choose.randrange(4, N_WORDS) for _ in range(shape.prompt)]
            file.write(json.dumps({"input": " ".join(f"w{i}" for i in ids), "ids": ids}) + "\n")
    _save_tokenizer(unfinished / "policy", shape.prompt + shape.response)
    _save_model(shape, unfinished / "policy")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _save_model(shape: Shape, folder: Path) -> None:
    """On the GPU if there is one, since 7.6 billion random numbers take a CPU long."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.prompt + shape.response,
        attention_bias=True,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = SHARED
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0].zero_()
            layer.mlp.down_proj.weight[0].zero_()
        model.lm_head.weight[EOS].zero_()
        model.lm_head.weight[EOS, 0] = EOS_WEIGHT
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path, longest: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(4, N_WORDS)]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=longest, **special).save_pretrained(folder)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    build(SHAPES[arguments.shape], arguments.folder)


if __name__ == "__main__":
    main()
