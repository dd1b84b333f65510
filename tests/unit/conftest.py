"""Tiny models, a character tokenizer, and the process that every test finds and leaves."""

import os
import string
from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 24
WINDOW = 5

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A process group writes LOCAL_RANK, libraries write more; processes of later tests would take it for theirs."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def linear_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's ZeRO-3 replaces it for good, with one that saves its input also where the weight is frozen."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Builds a tokenizer with one token per character; <pad> 0, <eos> 1, <end> 2, <sep> 3, 'a' 4, 'b' 5 and so on.

    All four are special tokens whatever is named: ``pad`` and ``eos`` are the names of those that play the role.
    """

    def make(*, pad: str | None = "<pad>", eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
        special = ["<pad>", "<eos>", "<end>", "<sep>"]
        vocab = {token: index for index, token in enumerate([*special, *string.ascii_lowercase])}
        core = Tokenizer(WordLevel(vocab, unk_token="<sep>"))
        core.add_special_tokens(special)
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        named = {
            name: token
            for name, token in (("pad_token", pad), ("eos_token", eos))
            if token is not None
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=core, additional_special_tokens=special, **named
        )

    return make


@pytest.fixture(scope="session")
def models() -> dict[str, PreTrainedModel]:
    """By architecture; large random weights, so that distributions are far from uniform."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "initializer_range": 0.5, "tie_word_embeddings": False}
    common |= {"bos_token_id": None, "eos_token_id": None}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**common, **sizes, **heads)),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(**common, n_positions=64, n_embd=16, n_layer=2, n_head=2)
        ),
        "mistral": MistralForCausalLM(
            MistralConfig(**common, **sizes, **heads, sliding_window=WINDOW)
        ),
    }
    return {name: model.eval() for name, model in made.items()}
