"""Examples in docstrings run, and each public name and noun has one."""

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.config import ModelConfig, TrainPPOConfig
from openppo.experience import ExperienceMaker
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.types import FinishReason, Prompt, SingleProcess
from tests.samples import one_segment

PACKAGE = Path(importlib.import_module("openppo").__path__[0])
LAZY = ("openppo.models", "openppo.experience")
NOUNS = ("openppo.types", "openppo.sample")
"""Modules that define what ``openppo.types`` exports; others have tests of their own."""


def assigned(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module assigns, each with the docstring below."""
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        target = statement.target if isinstance(statement, ast.AnnAssign) else target
        match target, below:
            case ast.Name(name), ast.Expr(ast.Constant(str(text))):
                yield name, inspect.cleandoc(text)


def docstrings(module: ModuleType) -> dict[str, str]:
    """By name: the docstrings of what a module defines."""
    tree = ast.parse(inspect.getsource(module))
    defined = {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    return defined | dict(assigned(tree))


def home(package: str, name: str) -> ModuleType:
    """The module that defines what a package exports lazily."""
    tree = ast.parse((PACKAGE / package.split(".")[1] / "__init__.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return importlib.import_module(str(node.module))
    raise LookupError(f"{package} does not export {name}")


def documented() -> list[tuple[ModuleType, str]]:
    """Public names of models and experience, and the nouns, each with its module."""
    places = [
        (home(package, name), name)
        for package in LAZY
        for name in importlib.import_module(package).__all__
    ]
    nouns = [
        (importlib.import_module(value.__module__), name)
        for name, value in vars(importlib.import_module("openppo.types")).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ in NOUNS
    ]
    return places + nouns


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a language model of two layers."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(tiny: str) -> dict[str, Any]:
    """Names that the examples may use beside those of their module: a model, a maker and two samples."""
    samples = [
        one_segment(
            token_ids=[5, 6, *response],
            action_mask=[False, False, True, True],
            log_probs=[0.0, 0.0, -3.4, -3.5],
            versions=[-1, -1, 0, 0],
            finish_reason=FinishReason.STOP,
            prompt=Prompt("ab", token_ids=[5, 6]),
            group=group,
            scores={"reward_fn": float(group)},
        )
        for group, response in enumerate(([9, 1], [7, 1]))
    ]
    maker = ExperienceMaker(
        actor=Actor(tiny),
        critic=get_llm_for_sequence_regression(tiny, "critic"),
        reference=Actor(tiny),
        config=TrainPPOConfig(ModelConfig(tiny)),
        comm=SingleProcess(),
        device=torch.device("cpu"),
        pad_token_id=0,
    )
    return {"torch": torch, "tiny": tiny, "maker": maker, "samples": samples}


PLACES = documented()


@pytest.mark.parametrize(
    ("module", "name"), PLACES, ids=[f"{module.__name__}.{name}" for module, name in PLACES]
)
def test_each_public_name_has_an_example_that_is_true(
    module: ModuleType, name: str, shared: dict[str, Any]
) -> None:
    text = docstrings(module)[name]
    assert ">>>" in text, f"{module.__name__}.{name} shows no example in its docstring."
    example = doctest.DocTestParser().get_doctest(text, vars(module) | shared, name, None, None)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.failed == 0, "".join(report)


def test_an_example_that_is_false_fails() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", None, None)
    assert doctest.DocTestRunner(verbose=False).run(example, out=[].append).failed == 1
