"""A calculator: python -m openppo.cli.train_ppo --tools examples/tools/calculator.py ...

An expression is parsed, never evaluated as Python: numbers, parentheses, + - * / // % ** and a few functions.
"""

import ast
import math
import operator

from openppo.agents.tools import tool

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS = {
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
LONGEST = 1000  # characters: deep nesting exhausts the stack


@tool
def calculate(expression: str) -> str:
    """Calculate an arithmetic expression, such as "(3 + 4.5) * 2 ** 8" or "sqrt(2) / 3".

    Args:
        expression: Numbers, parentheses, + - * / // % ** and sqrt, log, exp, abs, round, min, max.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    value = evaluate(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    return (
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        else str(value)
    )


def evaluate(node: ast.expr) -> float:
    """The value of a parsed expression; ``ValueError`` for anything that is no arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left), evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            return float(left) ** float(right)  # of integers it may take all memory
        if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return FUNCTIONS[node.func.id](*map(evaluate, node.args))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
