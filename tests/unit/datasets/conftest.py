"""A character tokenizer small enough to check by hand, and the folder of real inputs."""

import string
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerBase]


@pytest.fixture
def make_tokenizer() -> MakeTokenizer:
    """Builds a tokenizer with one token per character; special tokens have the ids 0-6 of ``SPECIAL``."""

    def make(
        *, bos: bool = False, eos: bool = False, has_eos: bool = True, chat_template: str | None = CHAT_TEMPLATE
    ) -> PreTrainedTokenizerBase:
        vocab = {token: index for index, token in enumerate([*SPECIAL, *string.printable])}
        core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
        core.add_special_tokens(SPECIAL)
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        if bos or eos:
            single = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
            core.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])]
            )
        named = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        if has_eos:
            named["eos_token"] = "<eos>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerBase:
    """One token per character, BOS added in front, with a chat template."""
    return make_tokenizer(bos=True)
