"""A tool that adds: --tools examples/tools/adder.py"""

from openppo.agents.tools import tool


@tool
def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"{a + b:g}"
