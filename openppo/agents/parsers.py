"""Tool calls in the text of a model, by the format that its chat template asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """Name and arguments of a call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """Text around the calls, the calls, and why another could not be read."""

    content: str
    calls: list[ToolCall]
    error: str | None = None


Parser = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]
"""``parse(text, tools)``: a model's text, without its reasoning, and the tools that it was offered."""


def _none(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    return Parsed(text, [])


PARSERS: dict[str, Parser] = dict.fromkeys(
    ("hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek", "json"), _none
)
"""By the names of ``--tool_parser``."""


def choose_parser(template: str) -> str:
    """The parser whose format a chat template asks for (stub)."""
    return "json"
