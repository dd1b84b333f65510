"""Tools for a model: classes and functions of a user's file, or verl's YAML."""

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
    """JSON schema of one parameter or of all."""

    type: JSONType | list[JSONType] | None = None
    properties: "dict[str, JSONSchema] | None" = None
    items: "JSONSchema | bool | None" = None
    required: list[str] | None = None


class OpenAIFunctionSchema(BaseModel, extra="allow"):
    """A function in OpenAI's form."""

    name: str
    description: str = ""
    parameters: JSONSchema = JSONSchema(type="object")


class OpenAIFunctionToolSchema(BaseModel, extra="allow"):
    """A tool in OpenAI's form; other keys are kept."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def offered(self) -> dict[str, Any]:
        """Return the tool for a chat template, with its fields and always a description and parameters."""
        no_parameters = {"type": "object", "properties": {}}
        defaults = {"name": "", "description": "", "parameters": no_parameters}
        function = defaults | self.function.model_dump(exclude_unset=True)
        return {"type": "function", "function": function}


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
        schema = tool_schema or self.get_openai_tool_schema()
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of a tool that is made without one."""
        if not hasattr(self, "tool_schema"):
            raise ValueError(
                f"{type(self).__name__}: no schema. Override get_openai_tool_schema(), or put it in YAML."
            )
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin an episode with the row's create_kwargs; return the instance's id.

        A ``ToolResponse`` for the prompt may follow it.
        """
        return instance_id or uuid4().hex

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer a call with a text, a dict with "text" or a ``ToolResponse``.

        A reward and a dict of metrics may follow. ``parameters`` annotated as ``str`` are JSON text.
        """
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """Return the reward of the whole episode, or None; called once at its end."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Clean up after an episode, for whatever reason it ended."""


def rollout_trace_op(function: F) -> F:
    """Return ``function`` unchanged; verl would trace it."""
    return function


def tool(function: F) -> F:
    """Mark a function as a tool, with a schema from its signature, type hints and docstring."""
    vars(function)["is_tool"] = True
    return function


class FunctionTool(BaseTool):
    """A marked function. Its results become JSON unless they are texts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        schema = get_json_schema(function)
        schema["function"].pop("return", None)
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Call the function."""
        result = await call(self.function, **parameters, **kwargs)
        if isinstance(result, str | ToolResponse):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


def load_tools(location: str) -> list[BaseTool]:
    """Load the tools of a Python file, or of verl's YAML file; ``ValueError`` for one that cannot be used."""
    file = Path(location).expanduser()
    where = f"--tools {location}"
    with leaving_no_trace(where):
        load_makers = _module_makers if file.suffix == ".py" else _yaml_makers
        makers = load_makers(file, where)
        try:
            tools = [make() for make in makers]
        except (ValueError, DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(f"{where}: {_one_line(error)}") from error

    if not tools:
        raise ValueError(
            f"{where}: it has no tools. Write a subclass of BaseTool, or mark a function with @tool."
        )
    names = [tool.name for tool in tools]
    duplicates = sorted(name for name in names if names.count(name) > 1)
    if duplicates:
        raise ValueError(
            f"{where}: two tools are named {duplicates[0]!r}. Give one of them another name."
        )
    return tools


def _module_makers(file: Path, where: str) -> list[Callable[[], BaseTool]]:
    """Makers of a file's classes, then of its marked functions, without names that begin with _."""
    module = load_module(file, where)
    public = [value for name, value in vars(module).items() if not name.startswith("_")]

    makers: list[Callable[[], BaseTool]] = []
    for value in public:
        is_class = isinstance(value, type) and issubclass(value, BaseTool)
        if is_class and value.__module__ == module.__name__:
            makers.append(partial(value, {}, None))
    for value in public:
        if hasattr(value, "is_tool"):
            makers.append(partial(FunctionTool, value))
    return makers


def _imported(class_name: str) -> Any:
    """Import ``module.Class``."""
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


def _yaml_makers(file: Path, where: str) -> list[Callable[[], BaseTool]]:
    """Makers of ``tools: [{class_name, config, tool_schema}]``; modules may lie beside the file."""
    sys.path.append(str(file.resolve().parent))  # at the end, where it hides nothing
    schema = TypeAdapter(dict[Literal["tools"], list[_Entry]])
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = schema.validate_python(content).get("tools", [])
    except (OSError, yaml.YAMLError, ValueError) as error:
        problem = _one_line(error)
        remedy = ". Write a list 'tools:' of class_name (of an openppo.agents.tools.BaseTool), config and tool_schema."
        if problem[-1] == ".":
            remedy = ""
        raise ValueError(f"{where}: {problem}{remedy}") from error
    return [partial(entry.class_name, entry.config or {}, entry.tool_schema) for entry in entries]


def _one_line(error: Exception) -> str:
    """Return an error in one line, and only the first of a schema."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())

    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":  # from a function of ours
        return f"{place}: {first['ctx']['error']}"
    return f"{place}: {first['msg']}, got {first['input']!r:.60}"
