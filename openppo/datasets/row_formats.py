"""The common formats of data rows, recognized by their columns: of ``ROW_FORMATS`` the first that fits."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from openppo.datasets.sources import Row
from openppo.datasets.templates import Message, Tools, as_messages, as_text, shared_start, shortened
from openppo.datasets.turns import TRAINING_MARKS

Task = Literal["prompts", "sft", "pairs", "steps", "documents"]
"""Purpose of the rows."""


@dataclass(frozen=True)
class RowFields:
    """Content of a row in any format; None for missing parts.

    ``prompt``, ``response``, ``chosen`` and ``rejected`` are texts or lists of chat messages; without a prompt,
    ``chosen`` and ``rejected`` are whole. ``conversation`` is a whole chat, ``whole`` a text without a response. For
    process supervision ``response`` is a text with placeholders or a list of steps, and ``label`` the judgements. A
    ranking has its responses in ``ranked``, and in ``label`` their scores.
    ``tools`` are of column ``--tools_key``, ``media`` of ``--image_key`` and ``--video_key``, by kind, whose paths may
    be beside the ``source``.
    """

    prompt: Any = None
    response: Any = None
    chosen: Any = None
    rejected: Any = None
    label: Any = None
    conversation: list[Message] | None = None
    whole: Any = None
    ranked: Any = None
    tools: Tools | None = None
    media: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


Columns = tuple[tuple[str, ...], ...]
"""Columns that a row must have: one of each inner tuple."""


@dataclass(frozen=True)
class RowFormat:
    """One way to write rows: the columns of each task that it serves, and a test of their values.

    ``read`` takes a row and whether a chat template will be applied, and raises ``ValueError`` for malformed values.
    """

    name: str
    needs: Mapping[Task, Columns]
    read: Callable[[Row, bool], RowFields]
    fits: Callable[[Row], bool] = lambda row: True

    def columns_of(self, row: Row, task: Task) -> list[str]:
        """The columns that give ``row`` this format; empty if it has another one."""
        found = [next((name for name in names if name in row), "") for names in self.needs[task]]
        return found if all(found) and self.fits(row) else []

    def describe(self, task: Task) -> str:
        return f"{self.name!r} ({' and '.join(' or '.join(map(repr, names)) for names in self.needs[task])})"


PLAIN_PROMPT = ("input", "prompt")
PLAIN_RESPONSE = ("output", "response", "completion")
WHOLE = ("text", "content", "input")
QUESTION = ("question", "problem")
PROMPT_COLUMNS = ("prompt", *QUESTION, "instruction", "query", "input", "context")
"""Columns with the prompt of a preference or ranking; the first of them is read."""
SYSTEM = ("system", "system_prompt")
STEPS = ("steps", "completions", "model_output_steps")
FIRST_WRONG = ("first_wrong_step", "model_output_solution_first_error_step")


def _first(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if name in row), None)


def _plain(row: Row, chat: bool) -> RowFields:
    label = _first(row, "label", "answer", *PLAIN_RESPONSE)
    return RowFields(
        prompt=_first(row, *PLAIN_PROMPT), response=_first(row, *PLAIN_RESPONSE), label=label
    )


def _question_answer(row: Row, chat: bool) -> RowFields:
    """The solution is the response, the shorter answer the label; either stands in for the other."""
    answer, solution = row.get("answer"), row.get("solution")
    response, label = (
        (answer if solution is None else solution),
        (solution if answer is None else answer),
    )
    return RowFields(prompt=_first(row, *QUESTION), response=response, label=label)


def _alpaca(row: Row, chat: bool) -> RowFields:
    """All answers of a history are the assistant's, as the last one is."""
    prompt, output = _instruction(row, chat), row.get("output")
    conversation = None
    if isinstance(prompt, list) and output is not None:
        conversation = [*prompt, {"role": "assistant", "content": as_text(output)}]
    return RowFields(prompt=prompt, response=output, label=output, conversation=conversation)


def _instruction(row: Row, chat: bool) -> str | list[Message]:
    """The history, the instruction, and the input, if there are any: one below the other, or as turns of a chat."""
    text = as_text(row["instruction"]) + (f"\n{as_text(row['input'])}" if row.get("input") else "")
    turns = _turns_of_history(row.get("history"))
    if turns and chat:
        return [*turns, {"role": "user", "content": text}]
    return "\n".join([*(turn["content"] for turn in turns), text])


def _turns_of_history(value: Any) -> list[Message]:
    pairs = parsed(value) or []
    is_list = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    )
    texts = [text for pair in pairs for text in pair] if is_list else [None]
    if not all(isinstance(text, str) for text in texts):
        form = "a list of pairs, each an instruction and its answer"
        raise ValueError(
            f"column 'history' is not {form}: {shortened(value)}. Correct or remove the row."
        )
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def parsed(value: Any) -> Any:
    """The value of a JSON text, as CSV files and some Parquet files have it; any other ``value`` as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def extra_info(row: Mapping[str, Any]) -> Any:
    """verl's column of that name, as an object also where it is one as JSON text; empty without."""
    value = row.get("extra_info")
    content = parsed(value)
    if isinstance(content, dict):
        return content
    return {} if value is None else value


def kto_column(row: Row) -> str:
    """The column that says whether the answer of a KTO row is good; empty for any other row.

    Texts "true" and "false", as of CSV files, count where they are no answers: in ``kto_tag``, or beside a completion.
    """
    for name in ("label", "kto_tag"):
        value = row.get(name)
        may_be_text = name == "kto_tag" or "completion" in row
        if isinstance(value, bool) or (may_be_text and str(value).lower() in ("true", "false")):
            return name
    return ""


def with_system(fields: RowFields, row: Row, chat: bool) -> RowFields:
    """``fields`` with the text of the system column, if any, in front of the prompt."""
    if not fields.prompt or fields.whole is not None:
        return fields
    text = as_text(_first(row, *SYSTEM) or "")
    if not text.strip():
        return fields
    if not chat and isinstance(fields.prompt, str):
        return replace(fields, prompt=f"{text}\n{fields.prompt}")
    first, prompt = {"role": "system", "content": text}, as_messages(fields.prompt, "user")
    if prompt[0] == first:
        return fields
    conversation = [first, *fields.conversation] if fields.conversation else None
    return replace(fields, prompt=[first, *prompt], conversation=conversation)


def _parts_of_chat(conversation: Any) -> RowFields:
    """The last turn is the response if it is the assistant's."""
    turns = as_messages(conversation)
    if turns[-1]["role"] != "assistant":
        return RowFields(prompt=turns, conversation=turns)
    return RowFields(
        prompt=turns[:-1], response=turns[-1:], label=turns[-1]["content"], conversation=turns
    )


SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "system": "system", "observation": "tool", "tool": "tool"},
    **{"gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"},
}


def _sharegpt(row: Row, chat: bool) -> RowFields:
    conversation = row["conversations"]
    if not isinstance(conversation, list) or not conversation:
        raise ValueError(
            f"column 'conversations' is not a list of turns: {shortened(conversation)}."
        )
    turns = list(map(_sharegpt_turn, conversation))
    if "chosen" not in row or "rejected" not in row:
        return _parts_of_chat(turns)
    chosen, rejected = ([_sharegpt_turn(row[side])] for side in ("chosen", "rejected"))
    return RowFields(turns, chosen, chosen, rejected=rejected)


def _sharegpt_turn(turn: Any) -> Message:
    role = SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        names = ", ".join(SHAREGPT_ROLES)
        raise ValueError(
            f'not a turn with "from" (one of {names}) and a text "value": {shortened(turn)}.'
        )
    marks = {name: turn[name] for name in TRAINING_MARKS if name in turn}
    return {"role": role, "content": turn["value"], **marks}


def _preference(row: Row, chat: bool) -> RowFields:
    """Whole conversations are divided after their shared turns, regardless of the prompt column."""
    chosen, rejected = row["chosen"], row["rejected"]
    if (
        isinstance(chosen, list)
        and isinstance(rejected, list)
        and as_messages(chosen)[0]["role"] != "assistant"
    ):
        return _divided(as_messages(chosen), as_messages(rejected))
    return RowFields(_prompt_of(row, chat), chosen, chosen, rejected=rejected)


def _prompt_of(row: Row, chat: bool) -> Any:
    """The prompt beside responses; None without."""
    name = next((name for name in PROMPT_COLUMNS if name in row), None)
    if name == "instruction" and row[name] is not None:
        return _instruction(row, chat)
    return None if name is None else row[name]


def _divided(chosen: list[Message], rejected: list[Message]) -> RowFields:
    """The prompt is the shared turns at the start, such that the assistant follows in both."""
    n, end = 0, min(len(chosen), len(rejected)) - 1
    while n < end and all(
        chosen[n].get(key) == rejected[n].get(key) for key in ("role", "content", "tool_calls")
    ):
        n += 1
    while n > 0 and not chosen[n]["role"] == rejected[n]["role"] == "assistant":
        n -= 1
    return RowFields(
        prompt=chosen[:n] or None, response=chosen[n:], chosen=chosen[n:], rejected=rejected[n:]
    )


HH_ROLES = {"Human": "user", "Assistant": "assistant"}
HH_ANSWER = "\n\nAssistant:"


def _is_transcript(row: Row) -> bool:
    return all(
        isinstance(row[side], str) and row[side].startswith("\n\nHuman:")
        for side in ("chosen", "rejected")
    )


def _hh(row: Row, chat: bool) -> RowFields:
    """The prompt ends with the last "Assistant:" before the transcripts part."""
    chosen, rejected = as_text(row["chosen"]), as_text(row["rejected"])
    asked, answer, _ = shared_start(chosen, rejected).rpartition(HH_ANSWER)
    asked = asked if chat else asked + answer
    parts: Iterable[Any] = (asked, chosen[len(asked) :], rejected[len(asked) :])
    prompt, *sides = map(_turns_of_transcript, parts) if chat else parts
    return RowFields(prompt or None, sides[0], *sides)


def _turns_of_transcript(text: str) -> list[Message]:
    _, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": HH_ROLES[name], "content": said.strip()} for name, said in pairs]


def _steps(row: Row, chat: bool) -> RowFields:
    """Steps after the first wrong one are not judged and left out."""
    question = _first(row, "prompt", *QUESTION)
    steps = _first(row, *STEPS)
    wrong = _first(row, *FIRST_WRONG)
    if "labels" in row:
        return RowFields(question, steps, label=row["labels"])
    if not isinstance(steps, list):
        raise ValueError(
            f"the steps are not a list but {type(steps).__name__}: {shortened(steps)}. Correct the row."
        )
    if wrong is None or wrong == "N/A":
        return RowFields(question, steps, label=[True] * len(steps))
    if type(wrong) is not int or not 1 <= wrong <= len(steps):
        raise ValueError(
            f"the first wrong step is {shortened(wrong)}, and there are {len(steps)} steps, from 1 on."
        )
    return RowFields(question, steps[:wrong], label=[True] * (wrong - 1) + [False])


def _math_shepherd(row: Row, chat: bool) -> RowFields:
    return RowFields(response=_first(row, "input", "inputs"), label=_first(row, "label", "labels"))


def _is_verl(row: Row) -> bool:
    prompt, judge = parsed(row["prompt"]), parsed(row.get("reward_model"))
    return isinstance(prompt, list) and isinstance(judge or {}, dict)


def _verl(row: Row, chat: bool) -> RowFields:
    judge = parsed(row.get("reward_model")) or {}
    return RowFields(prompt=parsed(row["prompt"]), label=judge.get("ground_truth"))


def _ranking(row: Row, chat: bool) -> RowFields:
    return RowFields(_prompt_of(row, chat), ranked=row["responses"], label=row.get("scores"))


_CHAT, _TURNS = (("messages",),), (("conversations",),)
_VERL: Columns = (("prompt",), ("reward_model", "extra_info"))
_PAIR: Columns = (("chosen",), ("rejected",))
_MARKED: Columns = (("input", "inputs"), ("label", "labels"))
_STEPWISE: Columns = (("prompt", *QUESTION), STEPS, ("labels", *FIRST_WRONG))

ROW_FORMATS = (
    RowFormat(
        "messages", {"prompts": _CHAT, "sft": _CHAT}, lambda row, _: _parts_of_chat(row["messages"])
    ),
    RowFormat(
        "sharegpt", {"prompts": _TURNS, "sft": _TURNS, "pairs": (*_TURNS, *_PAIR)}, _sharegpt
    ),
    RowFormat("hh", dict.fromkeys(("prompts", "sft", "pairs"), _PAIR), _hh, fits=_is_transcript),
    RowFormat("preference", dict.fromkeys(("prompts", "sft", "pairs"), _PAIR), _preference),
    RowFormat("ranking", {"pairs": (PROMPT_COLUMNS, ("responses",))}, _ranking),
    RowFormat("verl", {"prompts": _VERL}, _verl, fits=_is_verl),
    RowFormat(
        "alpaca", {"prompts": (("instruction",),), "sft": (("instruction",), ("output",))}, _alpaca
    ),
    RowFormat(
        "question_answer",
        {"prompts": (QUESTION,), "sft": (QUESTION, ("solution", "answer"))},
        _question_answer,
    ),
    RowFormat("steps", {"steps": _STEPWISE}, _steps),
    RowFormat("math_shepherd", {"steps": _MARKED}, _math_shepherd),
    RowFormat("plain", {"prompts": (PLAIN_PROMPT,), "sft": (PLAIN_PROMPT, PLAIN_RESPONSE)}, _plain),
    RowFormat(
        "plain",
        {"prompts": (("text",),), "sft": (("text",),), "documents": (WHOLE,)},
        lambda row, _: RowFields(prompt=_first(row, *WHOLE), whole=_first(row, *WHOLE)),
    ),
)
"""All formats, the more special ones first."""
