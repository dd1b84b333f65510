"""Tools of a user's file and of verl's YAML."""

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, load_tools
from openppo.config.agents import AgentConfig
from tests.unit.agents.verl_tools import SCHEMA

FUNCTIONS = '''
from typing import Literal
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, tool

@tool
def convert(amount: float, to: Literal["EUR", "USD"] = "EUR", notes: list[str] | None = None) -> str:
    """Convert an amount of money.

    The rate is fixed.

    Args:
        amount: How much,
            in yen.
        to: The currency.
        notes: What else is to be said.

    Returns:
        The amount.
    """
    return f"{amount / 100} {to}"

@tool
async def count(words: list[str]) -> dict:
    """Count words.

    Args:
        words: Any number of them.
    """
    return {"n": len(words), "first": words[0]}

class Echo(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "echo"}})

class _Hidden(Echo):
    pass

def helper() -> None:
    """Not marked."""
'''


def saved(folder: Path, text: Any, name: str = "tools.py") -> str:
    (folder / name).write_text(
        textwrap.dedent(text) if isinstance(text, str) else yaml.safe_dump(text)
    )
    return str(folder / name)


def test_a_python_file_gives_its_classes_and_its_marked_functions(tmp_path):
    assert sorted(tool.name for tool in load_tools(saved(tmp_path, FUNCTIONS))) == [
        "convert",
        "count",
        "echo",
    ]


def test_a_function_has_the_schema_of_its_signature_and_docstring(tmp_path):
    tools = {
        tool.name: tool.tool_schema.offered()["function"]
        for tool in load_tools(saved(tmp_path, FUNCTIONS))
    }
    convert = tools["convert"]
    assert convert["description"] == "Convert an amount of money.\n\nThe rate is fixed."
    properties, required = convert["parameters"]["properties"], convert["parameters"]["required"]
    assert properties["amount"] == {"type": "number", "description": "How much, in yen."}
    assert properties["to"]["enum"] == ["EUR", "USD"]
    assert properties["to"]["description"] == "The currency."
    assert properties["notes"]["items"] == {"type": "string"} and properties["notes"]["nullable"]
    assert required == ["amount"] and "return" not in convert
    assert (
        tools["count"]["parameters"]["properties"]["words"]["description"] == "Any number of them."
    )
    assert tools["echo"] == {
        "name": "echo",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_a_function_returns_text_or_anything_in_json(tmp_path):
    tools = {tool.name: tool for tool in load_tools(saved(tmp_path, FUNCTIONS))}
    assert asyncio.run(tools["convert"].execute("", {"amount": 250.0})) == "2.5 EUR"
    assert json.loads(asyncio.run(tools["count"].execute("", {"words": ["a", "b"]}))) == {
        "n": 2,
        "first": "a",
    }


def test_a_schema_keeps_keys_that_it_does_not_know():
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == schema.offered() == SCHEMA
    assert schema.function.parameters.properties["answer"].minLength == 1


CLASSES = """
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema

class Given(BaseTool):
    pass

class Own(BaseTool):
    def __init__(self, config: dict, tool_schema):
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema(function={"name": config["name"]}))
"""


def test_yaml_makes_classes_with_config_and_schema_from_beside_it(tmp_path):
    saved(tmp_path, CLASSES, "beside_yaml.py")
    tools = [
        {"class_name": "beside_yaml.Given", "config": {"type": "native"}, "tool_schema": SCHEMA},
        {"class_name": "beside_yaml.Own", "config": {"name": "mine"}},
        {
            "class_name": "tests.unit.agents.verl_tools.OldGrader",
            "config": None,
            "tool_schema": {"function": {"name": "f"}},
        },
    ]
    given, own, installed = load_tools(saved(tmp_path, {"tools": tools}, "tools.yaml"))
    assert (given.name, given.config, given.tool_schema.offered()) == (
        "grade",
        {"type": "native"},
        SCHEMA,
    )
    assert (own.name, own.config, installed.config) == ("mine", {"name": "mine"}, {})


def schema_with(**parameters: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "description": "", "parameters": parameters}}


def entry(**more: Any) -> dict[str, Any]:
    return {"tools": [{"class_name": "beside_bad.Given", "tool_schema": SCHEMA} | more]}


MARK = "from openppo.agents.tools import tool\n@tool\n"
BAD = [
    (
        "tools.py",
        "x = 1",
        "it has no tools. Write a subclass of BaseTool, or mark a function with @tool.",
    ),
    (
        "tools.py",
        "import nothing_of_this_name",
        "cannot be imported (No module named 'nothing_of_this_name')",
    ),
    ("tools.py", "def f(:", "cannot be imported"),
    (
        "tools.py",
        MARK + "def f(a: int): ...",
        "Cannot generate JSON schema for f because it has no docstring!",
    ),
    (
        "tools.py",
        MARK + "def f(a: int): 'Do it.'",
        "Cannot generate JSON schema for f because the docstring has no",
    ),
    ("tools.py", MARK + "def f(a): 'Do it.'", "Argument a is missing a type hint in function f"),
    ("tools.py", MARK + "def f(a: object): 'Do it.'", "Couldn't convert the type hint"),
    (
        "tools.py",
        CLASSES.split("class Own")[0],
        "Given: no schema. Override get_openai_tool_schema()",
    ),
    (
        "tools.py",
        MARK + "def f(): 'Do it.'\ng = f",
        "two tools are named 'f'",
    ),
    ("tools.yaml", "tools: [", "Write a list 'tools:' of class_name ("),
    ("tools.yaml", {"tools": []}, "it has no tools"),
    ("tools.yaml", {"tool": [{"class_name": "a.B"}]}, "tool.[key]: Input should be 'tools'"),
    ("tools.yaml", entry(mcp={}), "tools.0.mcp: Extra inputs are not permitted"),
    ("tools.yaml", entry(config=[1]), "tools.0.config"),
    (
        "tools.yaml",
        entry(class_name="nowhere.Tool"),
        "(No module named 'nowhere'). Put nowhere.py beside the file",
    ),
    ("tools.yaml", entry(class_name="beside_bad.Missing"), "beside_bad.Missing cannot be imported"),
    (
        "tools.yaml",
        entry(class_name="json.JSONDecoder"),
        "Input should be a subclass of BaseTool, got <class 'json.decoder.JSONDecoder'>. Write a list 'tools:' of",
    ),
    (
        "tools.yaml",
        entry(tool_schema=schema_with(properties={"a": {"type": "text"}})),
        "properties.a.type",
    ),
    (
        "tools.yaml",
        entry(tool_schema=schema_with(required="a")),
        "required: Input should be a valid list",
    ),
    ("tools.yaml", entry(tool_schema={"name": "f"}), "tool_schema.function: Field required"),
    (
        "tools.yaml",
        {"tools": entry()["tools"] * 2},
        "two tools are named 'grade'. Give one of them another name.",
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_what_cannot_be_used_is_said_with_a_remedy(tmp_path, name, text, message):
    saved(tmp_path, CLASSES, "beside_bad.py")
    location = saved(tmp_path, text, name)
    with pytest.raises(ValueError, match=f"^--tools {location}: ") as raised:
        load_tools(location)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_is_said():
    with pytest.raises(ValueError, match="--tools nowhere.py: no such file"):
        load_tools("nowhere.py")
    with pytest.raises(ValueError, match="--tools nowhere.yaml: .* No such file"):
        load_tools("nowhere.yaml")


def test_responses_hold_text_and_lists_of_images_and_videos():
    with pytest.raises(ValueError, match="image"):
        ToolResponse(image="a.png")
    assert ToolResponse(text="a").text == "a"


def test_a_base_tool_keeps_a_given_id_or_makes_one():
    tool = BaseTool({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    assert asyncio.run(tool.create("a")) == "a"
    assert asyncio.run(tool.create()) != asyncio.run(tool.create())
    assert AgentConfig(tools="tools.py").form == "tools"
