"""The bound of tokens by characters holds for real tokenization, and is None where it could not."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from openppo.datasets.templates import encode_bare
from openppo.datasets.text_bound import BLANKS, TextBound, text_bound

TEXTS = [
    "the the  the\n\n   theatre",
    " " * 40 + "aaaaaaaa" * 9,
    "\u1112\u1161\u11ab" * 30,
    "中文 text",
]
COMPOSED = "\u03b1\u0313\u0300\u0345"  # alpha and three marks, of which NFC makes one character
ALPHABET = [
    "the",
    " ",
    "\n",
    "\xa0",
    "aaaaaaaa",
    "\u0301",
    COMPOSED,
    "é",
    "\U0001f600",
    "<end>",
    "<mark>",
    "q",
]


def wrapped(core: Tokenizer, **flags: bool) -> PreTrainedTokenizerFast:
    core.add_special_tokens(
        ["<end>", AddedToken("<mark>", normalized=False, special=True, **flags)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def of_bytes(normalizer=None, unit_count=256, **flags):
    """BPE of bytes, as of Qwen and Llama 3."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("q", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    units = sorted(pre_tokenizers.ByteLevel.alphabet())[:unit_count]
    core.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=units))
    return wrapped(core, **flags)


def falling_back(byte_fallback=True):
    """BPE of characters, as of Llama 2; unknown ones are bytes."""
    letters = ["<unk>", *"▁theaq", *(f"<0x{byte:02X}>" for byte in range(256)), "th", "the", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "▁")]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    core = Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return wrapped(core)


BOUNDED = {
    "bytes": of_bytes(),
    "bytes after NFC": of_bytes(normalizers.NFC()),
    "stripped marks": of_bytes(normalizers.NFC(), lstrip=True, rstrip=True),
    "byte fallback": falling_back(),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bound(name):
    tokenizer, drawn = BOUNDED[name], random.Random(0)
    bound = text_bound(tokenizer)
    texts = [*TEXTS, "aaaaaaaa" * 100, COMPOSED * 100, "<mark>" + " \n\xa0" * 100 + "<mark>", ""]
    texts += ["".join(drawn.choices(ALPHABET, k=50)) for _ in range(300)]
    for text in texts:
        assert bound.least_tokens(text) <= len(encode_bare(tokenizer, text)), text
    assert bound.least_tokens("the " * 1000) >= 3000 // bound.longest


def test_a_bound_is_the_length_by_the_longest_token():
    assert TextBound(longest=10).least_tokens("é" * 31) == 4
    assert TextBound(longest=10, composes=True).least_tokens("é" * 80 + "a" * 5) == 3
    assert TextBound(longest=10, composes=True).least_tokens("é" * 80 + "a" * 60) == 6
    assert TextBound(longest=10, strips=True).least_tokens("a b\n" * 20) == 4
    tokenizer = of_bytes(normalizers.NFC(), rstrip=True)
    longest = max(map(len, tokenizer.get_vocab()))
    assert text_bound(tokenizer) == TextBound(longest, composes=True, strips=True)


def test_tokenizers_that_drop_or_fuse_text_have_no_bound():
    lowers = of_bytes(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]))
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    removes = of_bytes()
    removes.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("q", "removed"), pre_tokenizers.ByteLevel()]
    )
    unbounded = [
        lowers,
        wrapped(words),
        wrapped(pieces),
        removes,
        of_bytes(unit_count=200),
        falling_back(False),
    ]
    assert [text_bound(tokenizer) for tokenizer in unbounded] == [None] * 6


def test_blanks_are_all_that_python_knows():
    assert sorted(BLANKS) == [letter for letter in map(chr, range(0x110000)) if letter.isspace()]
