"""Tools that a model may call: classes and functions of a user's file, or verl's YAML."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import yaml
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from openppo.agents.threads import call
from openppo.user_code import leaving_no_trace, load_module

F = TypeVar("F", bound=Callable[..., Any])
JSONType = Literal["string", "number", "integer", "boolean", "object", "array", "null"]


class _Schema(BaseModel):
    """A part of a JSON schema: keys that are not named here are kept."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    """One parameter."""

    type: JSONType | list[JSONType] | None = None
    description: str | None = None
    enum: list[Any] | None = None
    properties: "dict[str, OpenAIFunctionPropertySchema] | None" = None
    items: "OpenAIFunctionPropertySchema | bool | None" = None


class OpenAIFunctionParametersSchema(_Schema):
    """All parameters."""

    type: Literal["object"] = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Schema):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()


class OpenAIFunctionToolSchema(_Schema):
    """A tool in OpenAI's form."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def offered(self) -> dict[str, Any]:
        """What the chat template gets: all that was given, with a description and parameters in any case."""
        least = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
        return {"type": "function", "function": least | self.function.model_dump(exclude_unset=True)}


class ToolResponse(BaseModel):
    """Result of a call."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """A tool, made once, with an instance in each episode. Methods may be coroutines or plain functions."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema of a tool that is made without one."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError("it has no schema: override get_openai_tool_schema(), or give tool_schema in a YAML file.")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin an episode with the row's create_kwargs; an id, or that and a ``ToolResponse`` for the prompt."""
        return instance_id or uuid4().hex

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer a call: a text, a dict with "text" or a ``ToolResponse``; a reward and a dict may follow.

        ``parameters`` annotated as ``str`` are JSON text.
        """
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """The reward of the whole episode, asked for once at its end."""
        return 0.0

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
        super().__init__({}, function_schema(function))
        self.function = function

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Call the function."""
        result = await call(self.function, **parameters, **kwargs)
        return result if isinstance(result, str | ToolResponse) else json.dumps(result, ensure_ascii=False, default=str)


def function_schema(function: Callable[..., Any]) -> OpenAIFunctionToolSchema:
    """Schema of a function; ``ValueError`` for what is missing in its signature or docstring."""
    text = inspect.getdoc(function) or ""
    about = re.split(r"\n *(?:Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?):|\n *:\w+", text)[0].strip()
    if not about:
        raise ValueError("it has no docstring, which tells the model what it does: write one.")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"its parameter {str(parameter)!r} cannot be given by name: replace it.")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"its parameter {parameter.name!r} has no type hint: write one.")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        parameters = adapter.json_schema() | {"type": "object"}
    except (PydanticUserError, NameError) as error:
        raise ValueError(f"a type hint has no JSON schema ({str(error).splitlines()[0]}): use another one.") from error
    described = re.findall(r"^( *)(?::param )?(\w+)(?: \([^)]*\))?: *(.+(?:\n\1 +\S.*)*)", text, flags=re.MULTILINE)
    for name, schema in parameters.setdefault("properties", {}).items():
        schema.pop("title", None)
        schema.update(("description", " ".join(said.split())) for _, named, said in described if named == name)
    made = {"name": function.__name__, "description": about, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": made})


class _Entry(BaseModel):
    """Of a YAML file."""

    model_config = ConfigDict(extra="forbid")
    class_name: str
    config: dict[str, Any] | None = None
    tool_schema: OpenAIFunctionToolSchema | None = None


class _YAML(BaseModel):
    """A YAML file."""

    tools: list[_Entry] = Field(min_length=1)


def load_tools(location: str) -> list[BaseTool]:
    """Tools of a Python file, or of verl's YAML file. ``ValueError`` says what of them cannot be used."""
    file, where = Path(location).expanduser(), f"--tools {location}"
    if file.suffix not in (".py", ".yaml", ".yml") or not file.is_file():
        raise ValueError(f"{where}: no such file of Python (.py) or YAML (.yaml). Check the path.")
    with leaving_no_trace(where):
        found = _of_module(file, where) if file.suffix == ".py" else _of_yaml(file, where)
        tools = [_made(make, f"{where}: {name}") for name, make in found]
    if not tools:
        raise ValueError(f"{where}: it has no tools. Write a subclass of BaseTool, or mark a function with @tool.")
    names = [tool.name for tool in tools]
    if twice := sorted(name for name in names if names.count(name) > 1):
        raise ValueError(f"{where}: two tools are named {twice[0]!r}. Give one of them another name.")
    return tools


Makers = list[tuple[str, Callable[[], BaseTool]]]


def _of_module(file: Path, where: str) -> Makers:
    """Marked functions, and classes that are written in the file; names that begin with _ are no tools."""
    module = load_module(file, where)
    public = {id(value): value for name, value in vars(module).items() if not name.startswith("_")}.values()
    classes = [v for v in public if inspect.isclass(v) and issubclass(v, BaseTool) and v.__module__ == module.__name__]
    functions = [value for value in public if inspect.isfunction(value) and hasattr(value, "is_tool")]
    makers: Makers = [(own.__name__, partial(own, {}, None)) for own in classes]
    return makers + [(marked.__name__, partial(FunctionTool, marked)) for marked in functions]


def _of_yaml(file: Path, where: str) -> Makers:
    """Classes of ``tools: [{class_name, config, tool_schema}]``; their modules may lie beside the file."""
    try:
        entries = _YAML.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))).tools
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{where}: {_first(error)}. Write a list 'tools:' of entries with class_name, config and tool_schema."
        ) from error
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # at its end, where it hides nothing
    makers: Makers = []
    for entry in entries:
        module, _, name = entry.class_name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, SyntaxError, AttributeError, ValueError) as error:
            what = f"{where}: {entry.class_name} cannot be imported ({error})"
            raise ValueError(
                f"{what}. Write module.Class, of a module that is installed or beside the file."
            ) from error
        if not inspect.isclass(found) or not issubclass(found, BaseTool):
            raise ValueError(f"{where}: {entry.class_name} is no BaseTool; import that from openppo.agents.tools.")
        makers.append((entry.class_name, partial(found, entry.config or {}, entry.tool_schema)))
    return makers


def _made(make: Callable[[], BaseTool], where: str) -> BaseTool:
    """A tool with a valid schema."""
    try:
        made = make()
        made.tool_schema = OpenAIFunctionToolSchema.model_validate(made.get_openai_tool_schema())
    except ValueError as error:
        raise ValueError(f"{where}: {_first(error)}") from error
    made.name = made.tool_schema.function.name
    return made


def _first(error: Exception) -> str:
    """An error in one line; of a schema its first."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return f"not a JSON schema of tools, {place}: {first['msg']}, got {first['input']!r:.60}"
