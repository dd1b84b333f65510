"""Where steps end, with tokenizers that put the separator with the words before or after it."""

import random
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openppo.rewards import step_ends

TEXT = "Add two.\n\nThen ✓🙂 halve.\n\nDone."


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE tokenizer without pre-tokenization: frequent pairs across words and separators are tokens."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    core.train_from_iterator(["two.\n\nThen two.\n\nThen halve.\n\nDone."] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_characters_of_several_tokens_do_not_shift_places(bpe):
    ids = bpe("🙂\n\n🙂🙂\n\n🙂")["input_ids"]  # four bytes and four tokens each, two for a separator
    assert [bpe.decode(ids[i : i + 4]) for i in (0, 6, 10, 16)] == ["🙂"] * 4
    assert step_ends(ids, bpe, "\n\n") == [3, 13, 19]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("ab", [1]),
        ("abXcdXe", [1, 4, 6]),
        ("XabXXcd", [2, 6]),
        ("abX", [1]),
        ("X", []),
        ("", []),
        ("XXX", []),
        ("ab cd ", [4]),
    ],
)
def test_blank_steps_and_blanks_at_the_end_do_not_count(text, ends, bpe):
    characters = [bpe.convert_tokens_to_ids("Ġ" if c == " " else c) for c in text]
    assert step_ends([*characters, bpe.eos_token_id], bpe, "X") == ends


def test_one_token_may_end_two_steps(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["zxz"])
    ids = tokenizer("azxzb")["input_ids"]
    assert len(ids) == 3
    assert step_ends(ids, tokenizer, "x") == [1, 2]
    assert step_ends(ids[:2], tokenizer, "x") == [1, 1]


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-v3", "phi3-mini", "gpt2"])
def test_places_are_those_of_a_search_from_the_left_for_any_tokens(name, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    ids = [*tokenizer(TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    starts = [0, *(end + 1 for end in step_ends(ids, tokenizer, "\n\n"))]
    texts = [tokenizer.decode(ids[start:stop]).strip() for start, stop in pairwise(starts)]
    assert texts == ["Add two.", "Then ✓🙂 halve.", "Done."]
    rng = random.Random(0)
    pieces = ["a", " the", "\n", "\n\n", "😀", "é", " ", "Step 1.", "中文", "-"]
    for separator in ("\n\n", "\n", "a") * 20:
        text = "".join(rng.choices(pieces, k=rng.randint(1, 30)))
        for ids in (tokenizer(text)["input_ids"], rng.choices(range(len(tokenizer)), k=20)):
            whole = tokenizer.decode(ids, skip_special_tokens=True)
            expected, start = [], 0
            for step in whole.split(separator):
                until_here = whole[: start + len(step.rstrip())]
                if step.strip():
                    prefixes = (tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1))
                    expected.append(next(n for n, p in enumerate(prefixes) if p.startswith(until_here)) - 1)
                start += len(step) + len(separator)
            assert step_ends(ids, tokenizer, separator) == expected
