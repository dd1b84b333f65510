"""The order of prompts: as given, or a user's, which is checked."""

import random

import pytest

from openppo.datasets import prompt_order, shuffled
from openppo.types import Prompt

PROMPTS = [Prompt(text, [0], row={"level": len(text)}) for text in ("abcd", "a", "abc", "ab")]
FILE = """
import random

def easy_first(prompts, episode, seed):
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].row["level"])
    if episode > 0:
        random.Random(seed + episode).shuffle(order)
    return order

def repeated(prompts):
    return [3, 3, 0, 0]

def missing(prompts):
    return [0, 1, 2]

def outside(prompts):
    return [0, 1, 2, 4]

def negative(prompts):
    return [0, 1, 2, -1]

def floats(prompts):
    return [0.0, 1.0, 2.0, 3.0]

def rows(prompts):
    return prompts

def by_chance(prompts, calls=[]):
    calls.append(0)
    return [len(calls) % 4] * 4

def by_name(names):
    return [0]

def later(prompts, episode):
    return range(4 - episode)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "order.py").write_text(FILE)
    return tmp_path / "order.py"


def test_given_is_the_order_of_the_rows_in_each_pass():
    order = prompt_order("given", PROMPTS, seed=1)
    assert [list(order(epoch)) for epoch in (0, 1)] == [[0, 1, 2, 3]] * 2
    assert prompt_order("shuffled", PROMPTS, seed=1)(2) == shuffled(4, seed=1)(2)


def test_a_function_orders_each_pass_and_may_repeat_prompts(file):
    order = prompt_order(f"{file}:easy_first", PROMPTS, seed=5)
    mixed = [1, 3, 2, 0]
    random.Random(5 + 2).shuffle(mixed)
    assert [order(0), order(2), order(0)] == [[1, 3, 2, 0], mixed, [1, 3, 2, 0]]
    assert prompt_order(f"{file}:repeated", PROMPTS, seed=5)(1) == [3, 3, 0, 0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "gave 3 indexes for episode 0 of 4 prompts: give as many"),
        ("outside", "gave the index 4 for episode 0: there are 4 prompts, from 0 on"),
        ("negative", "gave the index -1"),
        ("floats", r"raised TypeError.*float.*for episode 0 of 4 prompts"),
        ("rows", r"raised TypeError.*Prompt"),
        ("by_chance", r"gave two orders for the same episode: .*random.Random\(seed \+ episode\)"),
        ("by_name", "parameter 'names' has no value; known are prompts, episode, seed"),
        ("nothing", "has no function 'nothing'. It has: by_chance, by_name, easy_first"),
    ],
)
def test_an_order_that_cannot_be_used_is_an_error_with_a_remedy(file, name, says):
    with pytest.raises(ValueError, match=f"--prompt_order {file}:{name}.*{says}"):
        prompt_order(f"{file}:{name}", PROMPTS, seed=5)


def test_later_passes_are_checked_when_they_begin(file):
    order = prompt_order(f"{file}:later", PROMPTS, seed=5)
    with pytest.raises(ValueError, match="gave 3 indexes for episode 1"):
        order(1)
