"""Where steps end, with tokenizers that put the separator with the words before or after it."""

import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from openppo.rewards import step_ends
from tests.conftest import save_tokenizer

TEXT = "Add two.\n\nThen ✓🙂 halve.\n\nDone."


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
def test_blank_steps_and_blanks_at_the_end_do_not_count(text, ends, tmp_path):
    tokenizer = save_tokenizer(tmp_path, "abcdeX ")
    assert step_ends([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], tokenizer, "X") == ends


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
