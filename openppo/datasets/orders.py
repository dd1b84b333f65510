"""Order of the prompts of a run: shuffled, as given, or by a user's function."""

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from openppo.config.fields import names_file
from openppo.datasets.sampler import Order, shuffled
from openppo.types import Prompt
from openppo.user_code import errors_of, leaving_no_trace, load_callable, parameters_among

_FLAG = "--prompt_order"
_VALUES = ("prompts", "episode", "seed")
"""Parameters of a user's function."""


def prompt_order(choice: str, prompts: Sequence[Prompt], seed: int) -> Order:
    """Make the order of ``--prompt_order``; ``ValueError`` names it and what is wrong with a user's function.

    >>> list(prompt_order("given", [Prompt("a", [0]), Prompt("b", [1])], seed=42)(0))
    [0, 1]
    """
    if choice == "shuffled":
        return shuffled(len(prompts), seed)
    if not names_file(choice):
        return lambda epoch: range(len(prompts))

    where = f"{_FLAG} {choice}"
    function = load_callable(choice, _FLAG)
    names = parameters_among(function, _VALUES, where)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        values = {"prompts": list(prompts), "episode": epoch, "seed": seed}
        return _call(function, {name: values[name] for name in names}, where, n_rows=len(prompts))

    first = order(0)
    order.cache_clear()
    if order(0) != first:
        raise ValueError(
            f"{where} gave two orders for the same episode: let it depend on {', '.join(_VALUES)} alone, as with "
            "random.Random(seed + episode), so that a run can resume."
        )
    return order


def _call(
    function: Callable[..., Any], values: dict[str, Any], where: str, n_rows: int
) -> list[int]:
    """Return the indexes that ``function`` gives; ``ValueError`` unless they are so many indexes of rows."""
    episode = values.get("episode", 0)
    with leaving_no_trace(where), errors_of(where, f"for episode {episode} of {n_rows} prompts"):
        indexes = [operator.index(index) for index in function(**values)]

    outside = [index for index in indexes if not 0 <= index < n_rows]
    if outside:
        raise ValueError(
            f"{where} gave the index {outside[0]} for episode {episode}: there are {n_rows} prompts, from 0 on."
        )
    if len(indexes) != n_rows:
        raise ValueError(
            f"{where} gave {len(indexes)} indexes for episode {episode} of {n_rows} prompts: give as many, so that the "
            "number of steps is known. To leave prompts out, repeat others."
        )
    return indexes
