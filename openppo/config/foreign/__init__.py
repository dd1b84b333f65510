"""Names that other libraries have for our options and values: answers to unknown flags, and aliases of values.

``NAMES`` is the one table of names. Errors and ``--help`` print from it, and so do docs/trl.md, docs/openrlhf.md and
docs/verl.md. Names of flags are answered, never translated; an alias of a value stands for our value.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from openppo.config.foreign import earlier, openrlhf, others, trl, verl

VALUES: dict[str, dict[str, str]] = {
    "advantage_estimator": {
        "grpo": "group_norm",
        "dr.grpo": "dr_grpo",
        "reinforce++": "reinforce",
        "reinforce_plus_plus": "reinforce",
        "reinforce++-baseline": "reinforce_baseline",
        "reinforce++_baseline": "reinforce_baseline",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
    },
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "policy_loss_type": {"vanilla": "ppo"},
    "loss_agg": {
        "token-mean": "token_mean",
        "dapo": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "grpo": "sequence_mean",
        "dr_grpo": "constant",
    },
}
"""Our values by the names of other libraries, for each option that has some."""

IN_HELP = (
    "beta",
    "num_generations",
    "max_new_tokens",
    "output_dir",
    "num_train_epochs",
    "report_to",
    "n_samples",
    "epochs",
    "actor_rollout_ref.rollout.n",
)
"""Names that ``--help`` shows, as far as the command has their flags."""

_NAME = re.compile(r"([\w.]+)(?: \(([^)]*)\))?")
_FLAG = re.compile(r"--([a-z0-9_]+)")


@dataclass(frozen=True)
class ForeignName:
    """Names of one meaning in another library, and our flags for it.

    ``names`` has the default of each; ``flags`` is "none" where there is no counterpart. Several short names belong to
    no library.
    """

    library: str
    names: dict[str, str]
    flags: str
    note: str

    def is_for(self, known: Container[str]) -> bool:
        """True if a command with the options ``known`` has all flags that are mentioned."""
        return all(option in known for option in self.options())

    def options(self) -> list[str]:
        """Return our options that are mentioned."""
        return [name for name in _FLAG.findall(f"{self.flags} {self.note}") if name != "config"]

    def answer(self, name: str) -> str:
        """Say what one of the names is here: ``TRL's beta is --init_kl_coef here.``"""
        whose = f"{self.library}'s {name}" if self.library else name
        is_here = f"is {self.flags} here" if self.flags != "none" else "has no counterpart here"
        return f"{whose} {is_here}{self.note and ': '}{self.note}."


def read_table(library: str, text: str) -> list[ForeignName]:
    """Read lines ``name (default), ... = flags | note``; a line may continue after a comma or before the =."""
    joined = re.sub(r",\n\s*|\n\s*(?==)", lambda end: ", " if end[0][0] == "," else " ", text)
    rows = []
    for line in joined.strip().splitlines():
        names, _, meaning = line.strip().partition(" = ")
        flags, _, note = meaning.partition(" | ")
        rows.append(ForeignName(library, dict(_NAME.findall(names)), flags=flags, note=note))
    return rows


NAMES: dict[str, list[ForeignName]] = {
    "versions/names": read_table("", earlier.EARLIER),
    "trl/PPOConfig": read_table("TRL", trl.PPO),
    "trl/TrainingArguments": read_table("TRL", trl.TRAINING),
    "trl/GRPOConfig": read_table("TRL", trl.GRPO),
    "trl/supervised": read_table("TRL", trl.SUPERVISED),
    "openrlhf/train_ppo": read_table("OpenRLHF", openrlhf.PPO),
    "openrlhf/supervised": read_table("OpenRLHF", openrlhf.SUPERVISED),
    "verl/main_ppo": read_table("verl", verl.PPO),
    "troubleshooting/names": read_table("", others.OTHERS),
}
"""Names by page and section of docs/, in the order in which an answer is looked for."""

VERL_SECTIONS = frozenset(
    name.partition(".")[0] for row in NAMES["verl/main_ppo"] for name in row.names
)
"""First parts of the keys of verl's configuration."""


def answer_by_meaning(name: str, known: Container[str]) -> str | None:
    """Say what a name of another library is here; None for others, or if ``known`` lacks the flags."""
    for row in _rows_of(name, known):
        return row.answer(name)
    section, _, key = name.partition(".")
    if key and section in VERL_SECTIONS:
        return f"{name} is not in the tables of docs/verl.md; see --help all for every option."
    return None


def shown_in_help(known: Container[str]) -> str:
    """Return a sentence with the most common names and our flags for them; empty without any."""
    pairs = []
    for name in IN_HELP:
        row = next(_rows_of(name, known), None)
        if row is not None:
            pairs.append(f"{name}: {row.flags}")
    if not pairs:
        return ""
    return f"Names of TRL, OpenRLHF and verl are answered with those here: {', '.join(pairs)}, ..."


def our_value(option: str, value: Any) -> Any:
    """Return our name of a value of ``option``; any other value as it is."""
    return VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value


def reading_of(option: str, alias: str) -> str:
    """Say how an alias of a value is read: ``--kl_estimator low_var_kl is read as k3.``"""
    return f"--{option} {alias} is read as {our_value(option, alias)}."


def _rows_of(name: str, known: Container[str]) -> Iterator[ForeignName]:
    """Yield rows with a name whose flags are all ``known``, the best first."""
    for rows in NAMES.values():
        yield from (row for row in rows if name in row.names and row.is_for(known))
