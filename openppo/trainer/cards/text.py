"""Text of a model card: YAML header and Markdown, from the facts of a run and the saved folder."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from openppo.models.pretrained import is_peft_folder
from openppo.tracking.card_file import card_header
from openppo.trainer.cards.data import is_of_hub

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_METHODS = {"gae": "PPO", "group_norm": "GRPO", "rloo": "RLOO", "remax": "ReMax"}
"""Names of methods of train_ppo by their estimator; others are called by the estimator."""
_KINDS = {"sft": "supervised fine-tuning", "rm": "preferences", "prm": "judgements of steps"}
_SHOWN = re.compile(r"eval_(reward(/.+)?|pass@\d+|response_length|loss|accuracy)")
"""Held-out metrics in the table of a card."""
_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
_PEFT_CLASSES = {
    "AutoModelForCausalLM": "AutoPeftModelForCausalLM",
    "AutoModelForSequenceClassification": "AutoPeftModelForSequenceClassification",
}
OWN = """The license and what the model is for are for you to add. OpenPPO leaves an edited card as it is."""


def model_facts(name: str) -> dict[str, str]:
    """Return facts of the model that a run starts from: its name, hub name and license, if known."""
    if not Path(name).is_dir():
        facts = {"name": name.rpartition("/")[2]}
        if _HUB_NAME.fullmatch(name):
            facts["hub"] = name
        return facts

    header = card_header(Path(name))
    facts = {"name": Path(name).resolve().name}
    base = header.get("base_model")
    if isinstance(base, str):
        facts["hub"] = base
    if isinstance(header.get("license"), str):
        facts["license"] = header["license"]
    return facts


def auto_class_of(folder: Path) -> str:
    """Return the class of transformers that loads the model, or the base of the adapters, in ``folder``."""
    name = "model_config.json" if is_peft_folder(str(folder)) else "config.json"
    config = json.loads((folder / name).read_text(encoding="utf-8"))
    kind = (config.get("architectures") or [""])[0]
    for ending, auto_class in _CLASSES.items():
        if kind.endswith(ending):
            return auto_class
    return "AutoModelForCausalLM"


def pipeline_of(auto_class: str) -> str:
    """Return the hub's name for what such a model does."""
    pipelines = {
        "AutoModelForImageTextToText": "image-text-to-text",
        "AutoModelForSequenceClassification": "text-classification",
    }
    return pipelines.get(auto_class, "text-generation")


def use_of(auto_class: str, has_adapters: bool, writes: bool) -> str:
    """Show how a model is loaded and, if it ``writes`` text, how people talk with it."""
    library = "transformers"
    if has_adapters and auto_class in _PEFT_CLASSES:
        library = "peft"
        auto_class = _PEFT_CLASSES[auto_class]
    code = f'from {library} import {auto_class}\n\nmodel = {auto_class}.from_pretrained("FOLDER")'
    text = f"With `FOLDER` as the place of this model:\n\n```python\n{code}\n```"
    return text + "\n\n```bash\nopenppo chat FOLDER\n```" if writes else text


@dataclass(frozen=True)
class CardText:
    """Card of the model in ``folder``, which was saved after ``step`` and ``samples`` of a run with these ``facts``."""

    facts: Mapping[str, Any]
    folder: Path
    step: int
    samples: int
    evaluations: Sequence[Mapping[str, Any]]

    def header(self) -> dict[str, Any]:
        """Return the header in the hub's form; the license only where the start's card names one."""
        start = {} if self._is_critic else self.facts["start"]
        tags = ["openppo", *filter(None, (self.facts["kind"], self.facts["estimator"]))]
        header: dict[str, Any] = {"library_name": "peft" if self.has_adapters else "transformers"}
        if "license" in start:
            header["license"] = start["license"]
        if "hub" in start:
            header["base_model"] = start["hub"]
        hub = [entry["name"].partition("@")[0] for entry in self._data if is_of_hub(entry)]
        if hub:
            header["datasets"] = list(dict.fromkeys(hub))
        header["pipeline_tag"] = pipeline_of(self.auto_class)
        header["tags"] = list(dict.fromkeys(tags))
        return header

    def body(self) -> str:
        """Return the Markdown of the card."""
        of_run = f"{self.facts['start']['name']}, trained by {self._method}"
        title = f"# Critic of {of_run}" if self._is_critic else f"# {of_run}"
        writes = not self._scores and self.facts["kind"] != "prm"
        use = use_of(self.auto_class, self.has_adapters, writes=writes)
        parts = [title, self._role(), use]
        parts += ["## Training", f"```bash\n{self.facts['command']}\n```", self._run()]
        if self._data:
            parts += ["## Data", _table(self._data_rows())]
        if self.evaluations:
            parts += ["## Held-out figures", _table(self._figures()), self._about_figures()]
        parts.append(OWN)
        return "\n\n".join(parts) + "\n"

    @cached_property
    def has_adapters(self) -> bool:
        """True if the folder holds adapters."""
        return is_peft_folder(str(self.folder))

    @cached_property
    def auto_class(self) -> str:
        """Class of transformers that loads the model."""
        return auto_class_of(self.folder)

    @property
    def _scores(self) -> bool:
        return self.auto_class == "AutoModelForSequenceClassification"

    @property
    def _is_critic(self) -> bool:
        return self._scores and self.facts["kind"] == "ppo"

    @property
    def _data(self) -> Sequence[Mapping[str, str]]:
        return self.facts.get("data", [])

    @property
    def _method(self) -> str:
        kind = self.facts["kind"]
        estimator = self.facts["estimator"]
        return _KINDS.get(kind) or _METHODS.get(estimator, f"policy gradients ({estimator})")

    def _role(self) -> str:
        """Say what kind of model it is."""
        form = "Adapters (LoRA) of a" if self.has_adapters else "A"
        kind = self.facts["kind"]
        if self._is_critic:
            return f"{form} critic: it estimates the reward still to come at each token, and writes no text."
        if kind == "rm":
            return (
                f"{form} reward model: it scores a text at its last token, higher for a better one."
            )
        if kind == "prm":
            return f"{form} process reward model: it judges each step of a solution."
        return f"{form} language model."

    def _run(self) -> str:
        """Tell steps, samples, devices and versions."""
        steps = f"{self.step:,} {'global' if self.facts['kind'] == 'ppo' else 'optimizer'} steps"
        text = f"Saved after {steps} on {self.samples:,} samples"
        devices = self.facts.get("devices")
        if devices:
            text += f", on {self.facts['n_ranks']} x {', '.join(devices)}"
        versions = self.facts.get("versions", {})
        if versions:
            text += f", with {', '.join(f'{name} {version}' for name, version in versions.items())}"
        return f"{text}. Trained with [OpenPPO](https://github.com/openppo/openppo)."

    def _data_rows(self) -> list[list[str]]:
        """Rows of the table of data."""
        rows = [["option", "data", "rows of the option", "sha256 or commit"]]
        counts = self.facts.get("rows", {})
        for entry in self._data:
            digest = entry.get("sha256") or entry.get("commit")
            n_rows = counts.get(entry["flag"])
            rows.append(
                [
                    f"`--{entry['flag'].removeprefix('--')}`",
                    f"`{entry['name']}`",
                    "" if n_rows is None else f"{n_rows:,}",
                    f"`{digest}`" if digest else "not known",
                ]
            )
        return rows

    def _figures(self) -> list[list[str]]:
        """Rows of the table of held-out figures, a column for each evaluation."""
        titles = [
            "before training" if e["step"] == 0 else f"after step {e['step']:,}"
            for e in self.evaluations
        ]
        rows = [["figure", *titles]]
        names = [name for name in self.evaluations[-1]["metrics"] if _SHOWN.fullmatch(name)]
        for name in names:
            cells = [_figure(evaluation["metrics"], name) for evaluation in self.evaluations]
            rows.append([f"`{name}`", *cells])
        return rows

    def _about_figures(self) -> str:
        n_rows = self.facts.get("rows", {}).get("held out")
        of_rows = f" of {n_rows:,} rows" if n_rows else ""
        return (
            f"Held-out data{of_rows}. ± is half of the 95 % interval: 1.96 standard errors over prompts or pairs. "
            "It tells how a figure would vary with others of the same kind, not with another run."
        )


def _figure(metrics: Mapping[str, float], name: str) -> str:
    """A metric with its interval, if it has one."""
    if name not in metrics:
        return ""
    half_width = metrics.get(f"{name}_ci95")
    if half_width is None:
        return f"{metrics[name]:.4g}"
    if half_width == 0:
        return f"{metrics[name]:.4g} (all alike)"
    return f"{metrics[name]:.4g} ± {half_width:.2g}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows, the first of which has the titles, as a table of Markdown."""
    first, *others = [f"| {' | '.join(row)} |" for row in rows]
    rule = f"|{' --- |' * len(rows[0])}"
    return "\n".join([first, rule, *others])
