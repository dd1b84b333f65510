"""A character tokenizer small enough to check by hand, and the folder of real inputs."""

import string

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def make_tokenizer():
    """Builds a tokenizer with one token per character; special tokens have the ids 0-6 of ``SPECIAL``."""

    def make(*, bos=False, eos=False, has_eos=True, chat_template=CHAT_TEMPLATE):
        vocab = {token: index for index, token in enumerate([*SPECIAL, *string.printable])}
        core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
        core.add_special_tokens(SPECIAL)
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        core.post_processor = processors.TemplateProcessing(
            single=f"{'<bos> ' * bos}$A{' <eos>' * eos}",
            special_tokens=[("<bos>", 2), ("<eos>", 3)],
        )
        named = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        named |= {"eos_token": "<eos>"} if has_eos else {}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer):
    """One token per character, BOS added in front, with a chat template."""
    return make_tokenizer(bos=True)
