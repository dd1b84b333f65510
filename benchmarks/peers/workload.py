"""The models and prompts of the benchmarks: two workloads of 64 prompts a batch.

    python benchmarks/peers/workload.py FOLDER

Writes FOLDER/{w1,w2}/{policy,reward}, Llama checkpoints of 6.5 M parameters in float32 with a tokenizer, and
FOLDER/prompts.jsonl, 2048 prompts of 16 to 64 tokens as ``{"input": text, "ids": [...]}``. All participants read these.

W1: random weights, so that P(EOS) is about 1/4096 and nearly all responses run to the limit of 128 tokens.
W2: P(EOS) is about 1/32 at every token and the limit is 256, so that lengths are skewed, with a mean of about 32. The
weights alone do it, so every library sees it: all embeddings share the value of one residual channel, which no layer
writes to, and the output row of EOS reads that channel only.
"""

import argparse
import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY, PAD, BOS, EOS = 4096, 0, 1, 2
N_PROMPTS = 2048
EOS_PROBABILITY = 1 / 32  # of W2
CONSTANT = 0.3  # the value of W2's shared channel
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def build(folder: Path) -> None:
    """Write everything to ``folder``, which is not there before all of it is."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    with open(unfinished / "prompts.jsonl", "w", encoding="utf-8") as file:
        for ids in _prompts():
            file.write(json.dumps({"input": " ".join(f"w{i}" for i in ids), "ids": ids}) + "\n")
    for workload in ("w1", "w2"):
        torch.manual_seed(0)
        policy = LlamaForCausalLM(_config())
        if workload == "w2":
            _fix_eos_probability(policy)
        torch.manual_seed(1)
        reward = LlamaForSequenceClassification(_config(num_labels=1))
        for name, model in (("policy", policy), ("reward", reward)):
            model.save_pretrained(unfinished / workload / name)
            _save_tokenizer(unfinished / workload / name)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _prompts() -> list[list[int]]:
    choose = random.Random(0)
    return [
        [choose.randrange(4, VOCABULARY) for _ in range(length)]
        for length in (choose.randint(16, 64) for _ in range(N_PROMPTS))
    ]


def _config(**more: Any) -> LlamaConfig:
    special: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES, **special, **more)


def _save_tokenizer(folder: Path) -> None:
    names = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(4, VOCABULARY)]
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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side="left",
        model_max_length=SIZES["max_position_embeddings"],
        **special,
    )
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    # transformers 5 writes its own name for this class, which OpenRLHF's transformers 4 does not know
    file.write_text(
        json.dumps(written | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2),
        encoding="utf-8",
    )


@torch.no_grad()
def _fix_eos_probability(policy: LlamaForCausalLM) -> None:
    policy.model.embed_tokens.weight[:, 0] = CONSTANT
    for layer in policy.model.layers:
        layer.self_attn.o_proj.weight[0].zero_()
        layer.mlp.down_proj.weight[0].zero_()
    head = policy.lm_head.weight
    head[:, 0] = 0
    head[EOS].zero_()
    ids = torch.randint(4, VOCABULARY, (16, 96), generator=torch.Generator().manual_seed(5))
    hidden = policy.model(ids).last_hidden_state[:, 16:]  # (16, 80, H)
    logits = (hidden @ head.T).index_fill(-1, torch.tensor([EOS]), -torch.inf)
    wanted = torch.logsumexp(logits, -1) + math.log(EOS_PROBABILITY / (1 - EOS_PROBABILITY))
    head[EOS, 0] = wanted.mean() / hidden[..., 0].mean()


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)


if __name__ == "__main__":
    main()
