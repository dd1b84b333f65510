"""Images travel inside the tokens that they belong to, and never as an argument beside them."""

import ast

from tests.rules.test_staircase import TREES

IDS = {"ids", "token_ids", "prompt_ids", "input_ids", "sequences", "prompts", "prompt", "rows"}
IMAGES = {"media", "images"}


def both(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if a function takes token ids, and images as another argument."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {argument.arg for argument in every}
    return bool(names & IDS) and bool(names & IMAGES)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a module, methods and inner ones included."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_no_function_takes_images_beside_token_ids() -> None:
    found = [
        f"{path}:{function.lineno} {function.name}"
        for path, tree in TREES.items()
        for function in functions(tree)
        if both(function)
    ]
    assert found == [], "ModelInputs, or Tokens, hold both"


def test_no_call_passes_images_by_a_dict() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        and any(ast.unparse(key) == "'media'" for key in node.keys if key)
    ]
    assert found == []


def test_the_rule_finds_a_function_that_takes_both() -> None:
    [function] = functions(ast.parse("def submit(self, prompt_ids, *, media=()): ..."))
    assert both(function)
