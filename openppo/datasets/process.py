"""Rows -> solutions with a judgement of each step, for a process reward model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.config import ProcessConfig, RowsConfig, SupervisedConfig
from openppo.datasets.conversation import render_chat, with_answer
from openppo.datasets.prompts import render_prompt
from openppo.datasets.row_fields import RowFields
from openppo.datasets.row_reader import RowReader
from openppo.datasets.sources import ShowRows, SourceRow, naming_row
from openppo.datasets.templates import (
    Tools,
    as_text,
    encode_bare,
    encode_cut,
    encode_start,
    shortened,
)

IGNORED = -100
"""Label of tokens that are no placeholders."""
STEP_SEPARATOR = "\n\n"
"""Text between the steps of a list; also the default of --step_separator, by which responses are divided again."""


@dataclass(frozen=True)
class ProcessExample:
    """Equally long lists; ``labels[t]`` judges the step that ends in the placeholder ``token_ids[t]``.

    A label is the id of a reward token (hard), or as a float the probability of the first of two (soft), the same kind
    in all examples of a data set; -100 where no placeholder is.
    """

    token_ids: list[int]
    labels: list[int] | list[float]


@dataclass(frozen=True)
class StepEncoder:
    """Encoder of solutions for a process reward model, in training and scoring."""

    tokenizer: PreTrainedTokenizerBase
    placeholder: str
    placeholder_id: int
    options: RowsConfig

    def __call__(
        self, prompt: Any, steps: Sequence[str], tools: Tools | None = None
    ) -> tuple[list[int], list[int]]:
        """Encode the prompt and the steps, each with its placeholder; return the ids and the placeholders' places.

        ``prompt`` is a text, a list of chat messages, or None if the first step holds it. Between a prompt without
        template and the first step comes ``STEP_SEPARATOR``; further steps start with their separator.
        """
        first, *others = (step.rstrip(" ") for step in steps)
        ids = self._encode_start(prompt, first, tools)
        places = []
        for step in others:
            places.append(len(ids))
            with_placeholder = encode_bare(self.tokenizer, self.placeholder + step)
            if with_placeholder[:1] == [self.placeholder_id]:
                ids += with_placeholder
            else:
                ids += [self.placeholder_id, *encode_bare(self.tokenizer, step)]
        return [*ids, self.placeholder_id], [*places, len(ids)]

    def _encode_start(self, prompt: Any, first_step: str, tools: Tools | None) -> list[int]:
        """Encode the prompt, if any, and the first step."""
        template = self.options.input_template
        chat = self.options.apply_chat_template
        if prompt is None:
            if not chat and template is None:
                return encode_start(self.tokenizer, first_step)
            raise ValueError(
                "a solution that is one text holds its question too, so no template can go around it. Leave "
                "--apply_chat_template and --input_template out."
            )

        rendered = render_prompt(prompt, self.tokenizer, self.options, tools=tools)
        text = rendered.text
        separator = "" if chat or template else STEP_SEPARATOR
        whole = text + separator + first_step
        # Some templates refuse an empty turn.
        if rendered.messages and first_step:
            messages = with_answer(rendered.messages, first_step)
            whole = render_chat(messages, self.tokenizer, tools=tools)

        # The template may write a space between the prompt and the step.
        start = text + first_step
        place = whole.find(first_step, len(text)) if whole.startswith(text) else -1
        if place >= 0:
            start = whole[: place + len(first_step)]
        ids, _ = encode_cut(self.tokenizer, start, [len(text)], add_special_tokens=not chat)
        return ids


def load_process_examples(
    rows: Sequence[SourceRow],
    tokenizer: PreTrainedTokenizerBase,
    supervised: SupervisedConfig,
    data: ProcessConfig,
    show: ShowRows = iter,
) -> list[ProcessExample]:
    """Load one example per row, in order, without those longer than ``supervised.max_len`` tokens.

    A solution is a text with a placeholder after each step, or a list of steps; its judgements are the same text with
    a reward token in place of each placeholder (Math-Shepherd), or a list: of reward tokens or booleans (hard), or of
    numbers from 0 to 1 (soft). The placeholder follows the last token of its step, without a space between, and the
    ids end with the last placeholder. Raises ``ValueError`` naming the data's flag and the row for malformed values or
    another number of judgements than of placeholders, ``--placeholder_token`` or ``--reward_tokens`` for one that is
    not a single token, and ``--max_len`` if no example is left.
    """
    placeholder = data.placeholder_token
    reward_ids = {
        token: single_token_id(tokenizer, token, "--reward_tokens") for token in data.reward_tokens
    }
    placeholder_id = single_token_id(tokenizer, placeholder, "--placeholder_token")
    encode = StepEncoder(tokenizer, placeholder, placeholder_id, options=supervised)

    keys = None
    if data.input_key is not None or data.label_key is not None:
        keys = {
            "response": (data.input_key or "input", "--input_key"),
            "label": (data.label_key or "label", "--label_key"),
        }
    reader = RowReader(rows, "steps", supervised, keys=keys)

    def render(fields: RowFields) -> ProcessExample:
        steps = _steps(fields, placeholder)
        labels = _labels(fields, len(steps), placeholder, reward_ids=reward_ids)
        ids, places = encode(fields.prompt, steps, fields.tools)
        by_place = dict(zip(places, labels, strict=True))
        return ProcessExample(ids, [by_place.get(place, IGNORED) for place in range(len(ids))])

    examples = reader.make(
        render, ProcessExample, show, tokenizer=tokenizer, settings=[placeholder, reward_ids]
    )
    kinds = [_kinds_of_labels(example) for example in examples]
    for row, kinds_of_row in zip(rows, kinds, strict=True):
        with naming_row(row):
            if kinds_of_row != kinds[0]:
                raise ValueError(
                    "some rows are judged by numbers and some by reward tokens. Make them all the same."
                )
    return reader.within(("--max_len", supervised.max_len), examples)


def _kinds_of_labels(example: ProcessExample) -> set[type]:
    return {type(label) for label in example.labels if label != IGNORED}


def single_token_id(
    tokenizer: PreTrainedTokenizerBase, token: str, flag: str, flag_of_model: str = "--pretrain"
) -> int:
    """Return the id of ``token``.

    Raises ``ValueError`` naming both flags if it is not one token of the model's tokenizer.
    """
    ids = encode_bare(tokenizer, token)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        is_unknown = tokenizer.unk_token_id in ids
        problem = "not in the vocabulary" if is_unknown else f"{len(ids)} tokens"
        raise ValueError(
            f"{flag} {token!r} is {problem} of the tokenizer of {flag_of_model}, and must be one token of it. Choose "
            f"another with {flag}."
        )
    return ids[0]


def _steps(fields: RowFields, placeholder: str) -> list[str]:
    """Texts before each placeholder, separators included; text after the last one is not judged."""
    if not isinstance(fields.response, list):
        steps = as_text(fields.response).split(placeholder)[:-1]
        if not steps:
            raise ValueError(
                f"no placeholder {placeholder!r} in the solution. Name it with --placeholder_token."
            )
        return steps
    if not fields.response:
        raise ValueError("the list of steps is empty. Remove the row.")
    texts = [as_text(step) for step in fields.response]
    return texts[:1] + [STEP_SEPARATOR + text for text in texts[1:]]


def _labels(
    fields: RowFields, n_steps: int, placeholder: str, reward_ids: dict[str, int]
) -> list[int] | list[float]:
    """Read the judgement of each step."""
    judgements = fields.label
    if isinstance(judgements, str):
        judgements = _read_off(fields.response, judgements, placeholder, reward_ids=reward_ids)
    if not isinstance(judgements, list):
        raise ValueError(f"the judgements are neither a text nor a list: {shortened(judgements)}.")
    if len(judgements) != n_steps:
        raise ValueError(
            f"{n_steps} steps and {len(judgements)} judgements of them. Correct the row."
        )

    tokens = " ".join(reward_ids)
    if all(map(_is_number, judgements)):
        if len(reward_ids) != 2 or not all(0 <= number <= 1 for number in judgements):
            raise ValueError(
                f"judgements that are numbers must lie in [0, 1] and need exactly two --reward_tokens, good and bad: "
                f"{shortened(judgements)} with {tokens}."
            )
        return [float(number) for number in judgements]

    good, bad, *_ = reward_ids
    names = []
    for judgement in judgements:
        if isinstance(judgement, bool):
            judgement = good if judgement else bad
        names.append(judgement)
    if not all(isinstance(name, str) and name in reward_ids for name in names):
        raise ValueError(
            f"judgements {shortened(judgements)} are not all of --reward_tokens {tokens}, nor all true or false, nor "
            "all numbers."
        )
    return [reward_ids[name] for name in names]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_off(
    solution: Any, judged: str, placeholder: str, reward_ids: dict[str, int]
) -> list[str]:
    """Find the reward tokens in ``judged`` at the placeholders of ``solution``."""
    longest_first = sorted(reward_ids, key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first))
    pieces = as_text(solution).split(placeholder)
    match = re.fullmatch(f"({names})".join(map(re.escape, pieces)), judged)
    if match is None:
        raise ValueError(
            f"the label is not the solution with one of --reward_tokens {' '.join(reward_ids)} in place of each "
            f"placeholder {placeholder!r}."
        )
    return list(match.groups())
