"""Common formats of data rows, recognized by their columns: the first of ``ROW_FORMATS`` that fits."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from openppo.datasets.file_formats import Row
from openppo.datasets.row_fields import RowFields
from openppo.datasets.templates import Message, as_messages, as_text, shared_start, shortened
from openppo.datasets.turns import TRAINING_MARKS

RowPurpose = Literal["prompts", "sft", "pairs", "steps", "documents"]
"""Purpose of the rows."""


Columns = tuple[tuple[str, ...], ...]
"""Columns that a row must have: one of each inner tuple."""


@dataclass(frozen=True)
class RowFormat:
    """Format of rows: the columns of each task that it serves, and a test of their values.

    ``read`` takes a row, and True if a chat template will be applied. It raises ``ValueError`` for malformed values.
    """

    name: str
    needs: Mapping[RowPurpose, Columns]
    read: Callable[[Row, bool], RowFields]
    fits: Callable[[Row], bool] = lambda row: True

    def columns_of(self, row: Row, task: RowPurpose) -> list[str]:
        """Columns that give ``row`` this format; empty if it has another one."""
        columns = [_first_name(row, names) for names in self.needs[task]]
        return columns if all(columns) and self.fits(row) else []

    def describe(self, task: RowPurpose) -> str:
        """Name of the format with its columns, for messages."""
        columns = [" or ".join(map(repr, names)) for names in self.needs[task]]
        return f"{self.name!r} ({' and '.join(columns)})"


PLAIN_PROMPT = ("input", "prompt")
PLAIN_RESPONSE = ("output", "response", "completion")
WHOLE = ("text", "content", "input")
QUESTION = ("question", "problem")
PROMPT_COLUMNS = ("prompt", *QUESTION, "instruction", "query", "input", "context")
"""Columns with the prompt of a preference or ranking; the first of them is read."""
SYSTEM = ("system", "system_prompt")
STEPS = ("steps", "completions", "model_output_steps")
FIRST_WRONG = ("first_wrong_step", "model_output_solution_first_error_step")


def _first_name(row: Row, names: Iterable[str]) -> str:
    """The first of ``names`` that is a column; empty if none is."""
    return next((name for name in names if name in row), "")


def _first(row: Row, *names: str) -> Any:
    """Value of the first of the columns ``names``; None if the row has none of them."""
    name = _first_name(row, names)
    return row[name] if name else None


def _plain(row: Row, chat: bool) -> RowFields:
    prompt = _first(row, *PLAIN_PROMPT)
    response = _first(row, *PLAIN_RESPONSE)
    label = _first(row, "label", "answer", *PLAIN_RESPONSE)
    return RowFields(prompt=prompt, response=response, label=label)


def _question_answer(row: Row, chat: bool) -> RowFields:
    """Read the solution as the response, and the shorter answer as the label; either stands in for the other."""
    prompt = _first(row, *QUESTION)
    answer = row.get("answer")
    solution = row.get("solution")
    response = answer if solution is None else solution
    label = solution if answer is None else answer
    return RowFields(prompt=prompt, response=response, label=label)


def _alpaca(row: Row, chat: bool) -> RowFields:
    """Read the answers of a history as turns of the assistant, like the output."""
    prompt = _instruction(row, chat)
    output = row.get("output")
    conversation = None
    if isinstance(prompt, list) and output is not None:
        conversation = [*prompt, {"role": "assistant", "content": as_text(output)}]
    return RowFields(prompt=prompt, response=output, label=output, conversation=conversation)


def _instruction(row: Row, chat: bool) -> str | list[Message]:
    """Join history, instruction and input: line by line, or as turns of a chat."""
    text = as_text(row["instruction"])
    if row.get("input"):
        text += f"\n{as_text(row['input'])}"
    turns = _turns_of_history(row.get("history"))
    if turns and chat:
        return [*turns, {"role": "user", "content": text}]
    return "\n".join([*(turn["content"] for turn in turns), text])


def _turns_of_history(value: Any) -> list[Message]:
    pairs = parsed(value) or []
    if not isinstance(pairs, list) or not all(map(_is_pair_of_texts, pairs)):
        form = "a list of pairs, each an instruction and its answer"
        raise ValueError(
            f"column 'history' is not {form}: {shortened(value)}. Correct or remove the row."
        )

    turns: list[Message] = []
    for instruction, answer in pairs:
        turns.append({"role": "user", "content": instruction})
        turns.append({"role": "assistant", "content": answer})
    return turns


def _is_pair_of_texts(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2
    return is_pair and all(isinstance(text, str) for text in pair)


def parsed(value: Any) -> Any:
    """Read a JSON text, as CSV files and some Parquet files have it; any other ``value`` stays as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def extra_info(row: Mapping[str, Any]) -> Any:
    """Column "extra_info" of verl, with JSON text read as an object; empty if it is missing."""
    value = row.get("extra_info")
    content = parsed(value)
    if isinstance(content, dict):
        return content
    return {} if value is None else value


def kto_column(row: Row) -> str:
    """Name of the column that rates the answer of a KTO row; empty for any other row.

    Texts "true" and "false", as CSV files have them, count where they are no answers: in ``kto_tag``, or beside a
    completion.
    """
    for name in ("label", "kto_tag"):
        value = row.get(name)
        may_be_text = name == "kto_tag" or "completion" in row
        is_text = may_be_text and str(value).lower() in ("true", "false")
        if isinstance(value, bool) or is_text:
            return name
    return ""


def with_system(fields: RowFields, row: Row, chat: bool) -> RowFields:
    """Put the text of the system column, if any, in front of the prompt."""
    if not fields.prompt or fields.whole is not None:
        return fields
    text = as_text(_first(row, *SYSTEM) or "")
    if not text.strip():
        return fields
    if not chat and isinstance(fields.prompt, str):
        return replace(fields, prompt=f"{text}\n{fields.prompt}")

    system = {"role": "system", "content": text}
    prompt = as_messages(fields.prompt, "user")
    if prompt[0] == system:
        return fields
    conversation = [system, *fields.conversation] if fields.conversation else None
    return replace(fields, prompt=[system, *prompt], conversation=conversation)


def _parts_of_chat(conversation: Any) -> RowFields:
    """Divide a conversation into prompt and response: its last turn, if that is the assistant's."""
    turns = as_messages(conversation)
    last = turns[-1]
    if last["role"] != "assistant":
        return RowFields(prompt=turns, conversation=turns)
    return RowFields(prompt=turns[:-1], response=[last], label=last["content"], conversation=turns)


SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
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

    chosen = [_sharegpt_turn(row["chosen"])]
    rejected = [_sharegpt_turn(row["rejected"])]
    return RowFields(prompt=turns, response=chosen, chosen=chosen, rejected=rejected)


def _sharegpt_turn(turn: Any) -> Message:
    role = None
    if isinstance(turn, dict):
        role = SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None or not isinstance(turn.get("value"), str):
        names = ", ".join(SHAREGPT_ROLES)
        raise ValueError(
            f'not a turn with "from" (one of {names}) and a text "value": {shortened(turn)}.'
        )
    marks = {name: turn[name] for name in TRAINING_MARKS if name in turn}
    return {"role": role, "content": turn["value"], **marks}


def _preference(row: Row, chat: bool) -> RowFields:
    """Divide whole conversations after their shared turns, regardless of the prompt column."""
    chosen = row["chosen"]
    rejected = row["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        turns = as_messages(chosen)
        if turns[0]["role"] != "assistant":
            return _divided(turns, as_messages(rejected))

    prompt = _prompt_of(row, chat)
    return RowFields(prompt=prompt, response=chosen, chosen=chosen, rejected=rejected)


def _prompt_of(row: Row, chat: bool) -> Any:
    """Read the prompt beside responses; None without."""
    name = _first_name(row, PROMPT_COLUMNS)
    if name == "instruction" and row[name] is not None:
        return _instruction(row, chat)
    return row[name] if name else None


def _divided(chosen: list[Message], rejected: list[Message]) -> RowFields:
    """Divide conversations after their shared turns, such that the assistant follows in both."""
    n_shared = 0
    n_most = min(len(chosen), len(rejected)) - 1
    while n_shared < n_most and _are_same(chosen[n_shared], rejected[n_shared]):
        n_shared += 1
    while n_shared > 0:
        roles = {chosen[n_shared]["role"], rejected[n_shared]["role"]}
        if roles == {"assistant"}:
            break
        n_shared -= 1

    response = chosen[n_shared:]
    return RowFields(
        prompt=chosen[:n_shared] or None,
        response=response,
        chosen=response,
        rejected=rejected[n_shared:],
    )


def _are_same(turn: Message, other: Message) -> bool:
    return all(turn.get(key) == other.get(key) for key in ("role", "content", "tool_calls"))


HH_ROLES = {"Human": "user", "Assistant": "assistant"}
HH_ANSWER = "\n\nAssistant:"


def _is_transcript(row: Row) -> bool:
    sides = (row["chosen"], row["rejected"])
    return all(isinstance(side, str) and side.startswith("\n\nHuman:") for side in sides)


def _hh(row: Row, chat: bool) -> RowFields:
    """Divide transcripts after the last "Assistant:" that they share."""
    chosen = as_text(row["chosen"])
    rejected = as_text(row["rejected"])
    prompt, answer, _ = shared_start(chosen, rejected).rpartition(HH_ANSWER)
    if not chat:
        prompt += answer
    better = chosen[len(prompt) :]
    worse = rejected[len(prompt) :]
    if not chat:
        return RowFields(prompt=prompt or None, response=better, chosen=better, rejected=worse)

    messages = _turns_of_transcript(prompt)
    turns = _turns_of_transcript(better)
    worse_turns = _turns_of_transcript(worse)
    return RowFields(prompt=messages or None, response=turns, chosen=turns, rejected=worse_turns)


def _turns_of_transcript(text: str) -> list[Message]:
    _, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": HH_ROLES[name], "content": content.strip()} for name, content in pairs]


def _steps(row: Row, chat: bool) -> RowFields:
    """Read judged steps; those after the first wrong one are not judged, and left out."""
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
    labels = [True] * (wrong - 1) + [False]
    return RowFields(question, steps[:wrong], label=labels)


def _math_shepherd(row: Row, chat: bool) -> RowFields:
    response = _first(row, "input", "inputs")
    label = _first(row, "label", "labels")
    return RowFields(response=response, label=label)


def _is_verl(row: Row) -> bool:
    prompt = parsed(row["prompt"])
    judge = parsed(row.get("reward_model"))
    return isinstance(prompt, list) and isinstance(judge or {}, dict)


def _verl(row: Row, chat: bool) -> RowFields:
    judge = parsed(row.get("reward_model")) or {}
    return RowFields(prompt=parsed(row["prompt"]), label=judge.get("ground_truth"))


def _ranking(row: Row, chat: bool) -> RowFields:
    prompt = _prompt_of(row, chat)
    return RowFields(prompt=prompt, ranked=row["responses"], label=row.get("scores"))


def _messages(row: Row, chat: bool) -> RowFields:
    return _parts_of_chat(row["messages"])


def _whole(row: Row, chat: bool) -> RowFields:
    text = _first(row, *WHOLE)
    return RowFields(prompt=text, whole=text)


_CHAT: Columns = (("messages",),)
_TURNS: Columns = (("conversations",),)
_VERL: Columns = (("prompt",), ("reward_model", "extra_info"))
_PAIR: Columns = (("chosen",), ("rejected",))
_MARKED: Columns = (("input", "inputs"), ("label", "labels"))
_STEPWISE: Columns = (("prompt", *QUESTION), STEPS, ("labels", *FIRST_WRONG))

ROW_FORMATS = (
    RowFormat("messages", {"prompts": _CHAT, "sft": _CHAT}, _messages),
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
        _whole,
    ),
)
"""All formats, the more special ones first."""
