"""Models and prompts of the GPU benchmarks: shaped like Qwen2.5, with random weights that never sample EOS.

    python benchmarks/gpu/models.py SHAPE FOLDER

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

N_WORDS = (
    4096  # of the tokenizer; a model may have more rows, which are sampled and decode to nothing
)
PAD, BOS, EOS = 0, 1, 2
SHARED, EOS_WEIGHT = 0.3, -30000.0
"""The shared channel's value, and the weight with which EOS reads it."""


@dataclass(frozen=True)
class Shape:
    """A model, the lengths of its sequences in tokens, and how many responses a step has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    prompt: int = 256
    response: int = 256
    n_responses: int = 64


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 4096, True, prompt=24, response=16, n_responses=8),
    "small": Shape(1024, 8, 16, 4, 4096, 32000, True, prompt=256, response=128, n_responses=32),
    "0.5b": Shape(896, 24, 14, 2, 4864, 151936, True),
    "7b": Shape(3584, 28, 28, 4, 18944, 152064, False),
}
"""``small`` has 170 million parameters; libraries take little beside it."""


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
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=longest, **special
    ).save_pretrained(folder)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    build(SHAPES[arguments.shape], arguments.folder)


if __name__ == "__main__":
    main()
