"""Tools that a model may call: classes and functions of a user's file, or verl's YAML."""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

import yaml
from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from openppo.user_code import call, leaving_no_trace, load_module

F = TypeVar("F", bound=Callable[..., Any])
JSONType = Literal["string", "number", "integer", "boolean", "object", "array", "null"]


class JSONSchema(BaseModel, extra="allow"):
    """A JSON schema, of a parameter or of all."""

    type: JSONType | list[JSONType] | None = None
    properties: "dict[str, JSONSchema] | None" = None
    items: "JSONSchema | bool | None" = None
    required: list[str] | None = None


class OpenAIFunctionSchema(BaseModel, extra="allow"):
    """A function."""

    name: str
    description: str = ""
    parameters: JSONSchema = JSONSchema(type="object")


class OpenAIFunctionToolSchema(BaseModel, extra="allow"):
    """A tool in OpenAI's form; keys that are not named here are kept."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def offered(self) -> dict[str, Any]:
        """What the chat template gets: all that was given, with a description and parameters in any case."""
        least = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
        return {
            "type": "function",
            "function": least | self.function.model_dump(exclude_unset=True),
        }


class ToolResponse(BaseModel):
    """Result of a call."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """A tool, made once, with an instance in each episode. Methods may be coroutines or plain functions."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = config
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(
            tool_schema or self.get_openai_tool_schema()
        )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema of a tool that is made without one."""
        if not hasattr(self, "tool_schema"):
            raise ValueError(
                f"{type(self).__name__}: no schema. Override get_openai_tool_schema(), or put it in YAML."
            )
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin an episode with the row's create_kwargs; an id, or that and a ``ToolResponse`` for the prompt."""
        return instance_id or uuid4().hex

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer a call: a text, a dict with "text" or a ``ToolResponse``; a reward and a dict may follow.

        ``parameters`` annotated as ``str`` are JSON text.
        """
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """The reward of the whole episode, asked for once at its end; None: it has none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode, whatever ended it."""


def rollout_trace_op(function: F) -> F:
    """Mark a method that verl would trace; it stays as it is."""
    return function


def tool(function: F) -> F:
    """Mark a function as a tool, with a schema from its signature, type hints and docstring."""
    vars(function)["is_tool"] = True
    return function


class FunctionTool(BaseTool):
    """A marked function. What it returns is given in JSON unless it is a text."""

    def __init__(self, function: Callable[..., Any]) -> None:
        schema = get_json_schema(function)
        schema["function"].pop("return", None)
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Call the function."""
        result = await call(self.function, **parameters, **kwargs)
        return (
            result
            if isinstance(result, str | ToolResponse)
            else json.dumps(result, ensure_ascii=False, default=str)
        )


def load_tools(location: str) -> list[BaseTool]:
    """Tools of a Python file, or of verl's YAML file. ``ValueError`` says what of them cannot be used."""
    file, where = Path(location).expanduser(), f"--tools {location}"
    with leaving_no_trace(where):
        makers = _of_module(file, where) if file.suffix == ".py" else _of_yaml(file, where)
        try:
            tools = [make() for make in makers]
        except (ValueError, DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(f"{where}: {_first(error)}") from error
    if not tools:
        raise ValueError(
            f"{where}: it has no tools. Write a subclass of BaseTool, or mark a function with @tool."
        )
    names = [tool.name for tool in tools]
    if twice := sorted(name for name in names if names.count(name) > 1):
        raise ValueError(
            f"{where}: two tools are named {twice[0]!r}. Give one of them another name."
        )
    return tools


def _of_module(file: Path, where: str) -> list[Callable[[], BaseTool]]:
    """Marked functions, and classes that are written in the file; names that begin with _ are no tools."""
    module = load_module(file, where)
    public = [value for name, value in vars(module).items() if not name.startswith("_")]
    classes = [
        v
        for v in public
        if isinstance(v, type) and issubclass(v, BaseTool) and v.__module__ == module.__name__
    ]
    functions = [value for value in public if hasattr(value, "is_tool")]
    return [
        *(partial(own, {}, None) for own in classes),
        *(partial(FunctionTool, marked) for marked in functions),
    ]


def _imported(class_name: str) -> Any:
    """What ``module.Class`` names."""
    module, _, name = class_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, SyntaxError, AttributeError) as error:
        beside = f"{module.partition('.')[0]}.py"
        raise ValueError(
            f"{class_name} cannot be imported ({error}). Put {beside} beside the file, or install what it needs."
        ) from error


class _Entry(BaseModel, extra="forbid"):
    """A tool of a YAML file."""

    class_name: Annotated[type[BaseTool], BeforeValidator(_imported)]
    config: dict[str, Any] | None = None
    tool_schema: OpenAIFunctionToolSchema | None = None


def _of_yaml(file: Path, where: str) -> list[Callable[[], BaseTool]]:
    """Classes of ``tools: [{class_name, config, tool_schema}]``; their modules may lie beside the file."""
    sys.path.append(str(file.resolve().parent))  # at its end, where it hides nothing
    form = TypeAdapter(dict[Literal["tools"], list[_Entry]])
    try:
        entries = form.validate_python(yaml.safe_load(file.read_text(encoding="utf-8"))).get(
            "tools", []
        )
    except (OSError, yaml.YAMLError, ValueError) as error:
        form_of_file = "a list 'tools:' of class_name (of an openppo.agents.tools.BaseTool), config and tool_schema"
        problem = _first(error)
        raise ValueError(
            f"{where}: {problem}{'' if problem[-1] == '.' else f'. Write {form_of_file}.'}"
        ) from error
    return [partial(entry.class_name, entry.config or {}, entry.tool_schema) for entry in entries]


def _first(error: Exception) -> str:
    """An error in one line; of a schema its first."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    if first["type"] == "value_error":  # of a function of ours
        return f"{'.'.join(map(str, first['loc']))}: {first['ctx']['error']}"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.60}"
