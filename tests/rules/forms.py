"""Packed forms: ways to write Python that save lines where the reader pays. ``FORMS`` names them all."""

import ast
from collections.abc import Callable, Iterator, Mapping
from textwrap import shorten
from typing import NamedTuple

from tests.rules.ours import Class, Ours
from tests.rules.scopes import COMPREHENSIONS, FUNCTIONS, Scope, Source

VAGUE = set("given made found what how more rest asked said taken mine own".split())
ITERATES = {"enumerate", "iter", "list", "reversed", "set", "sorted", "tuple", "zip"}
"""Builtins through which a loop sees its values; ``EMPTY`` are those that make nothing when called with nothing."""
EMPTY = {"dict", "frozenset", "list", "set", "tuple"}

FORMS = {
    "star": "a star over a tuple packed for the call, or over a slice; write the arguments with their names",
    "pack": "a tuple assigned to three and more names; write a statement for each",
    "nested": "a comprehension inside a comprehension; write a loop, or a function for the inner one",
    "factor": "a comparison or `not` as a factor; write a conditional expression, or an if",
    "guarded": "a loop over a conditional expression with nothing in one branch; write an if around the loop",
    "chained": "a conditional expression inside a conditional expression; write if, elif and else",
    "vague": "a local, loop variable or parameter with a name that says nothing; write a noun",
    "unnamed": "an argument after the third, of a function or class of ours, without its name; write the name",
    "outside": "an attribute of a class of ours set outside that class; write a method, or make a new object",
}


class Place(NamedTuple):
    """One packed form. Lines move, so a list of places goes by the function: empty for the module itself."""

    form: str
    file: str
    function: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function or 'the module'}: {self.code}"


def places(texts: Mapping[str, str]) -> list[Place]:
    """All packed forms of a package, whose files are given by path."""
    sources = {file: Source(text) for file, text in texts.items()}
    ours = Ours(sources)
    hits: list[Place] = []
    for file, source in sources.items():
        nodes = {form: finder(source) for form, finder in FINDERS.items()}
        nodes |= {"unnamed": ours.unnamed(file), "outside": ours.set_outside(file)}
        for form, several in nodes.items():
            for node in several:
                function = source.sites[node].scope.name
                code = shorten(ast.unparse(node), 100)
                hits.append(Place(form, file, function, line=node.lineno, code=code))
        for name, scope, line in vague(source):
            hits.append(Place("vague", file, scope.name, line=line, code=name))
    return sorted(hits)


def stars(source: Source) -> Iterator[ast.AST]:
    """Calls with ``f(*given)`` after ``given = a, b``, with ``f(*(a, b))`` or ``f(*several[:5])``."""
    for call in source.nodes(ast.Call):
        values = [argument.value for argument in call.args if isinstance(argument, ast.Starred)]
        if any(is_slice(value) or is_packed(value, source) for value in values):
            yield call


def packs(source: Source) -> Iterator[ast.AST]:
    """``a, b, c = x, y, z``; also as a loop over this one tuple. The result of one expression is none."""
    for node in source.nodes(ast.Assign):
        if is_tuple(node.value) and any(
            is_tuple(target) and n_names(target) >= 3 for target in node.targets
        ):
            yield node
    for target, values in loops(source):
        once = isinstance(values, (ast.Tuple, ast.List)) and len(values.elts) == 1
        if once and is_tuple(values.elts[0]) and n_names(target) >= 3:
            yield values


def nested(source: Source) -> Iterator[ast.AST]:
    """Comprehensions inside others, each once; two ``for`` in one comprehension are none."""
    yield from inside_their_kind(source, COMPREHENSIONS)


def factors(source: Source) -> Iterator[ast.AST]:
    """``x * (a == b)``, ``(not y) * z``, ``x *= a < b``."""
    for node in source.nodes(ast.BinOp, ast.AugAssign):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if isinstance(node.op, ast.Mult) and any(is_boolean(side) for side in sides):
            yield node


def guarded(source: Source) -> Iterator[ast.AST]:
    """``for x in a if c else ()`` and ``for x in () if c else a``, in comprehensions too."""
    for _, values in loops(source):
        if any(
            isinstance(each, ast.IfExp) and any(map(is_empty, branches(each)))
            for each in iterated(values)
        ):
            yield values


def chained(source: Source) -> Iterator[ast.AST]:
    """Conditional expressions inside others, each once."""
    yield from inside_their_kind(source, (ast.IfExp,))


def vague(source: Source) -> Iterator[tuple[str, Scope, int]]:
    """Names that say nothing, once a scope: in functions, as fields of dataclasses, and of loops anywhere."""
    for scope in source.scopes():
        is_record = isinstance(scope.node, ast.ClassDef) and Class(scope.node).is_record
        is_checked = is_record or isinstance(scope.node, (*FUNCTIONS, *COMPREHENSIONS))
        for name in sorted(VAGUE & scope.bindings.keys()):
            bindings = [each for each in scope.bindings[name] if is_checked or each.kind == "loop"]
            if bindings:
                yield name, scope, bindings[0].position[0]


FINDERS: dict[str, Callable[[Source], Iterator[ast.AST]]] = {
    "star": stars,
    "pack": packs,
    "nested": nested,
    "factor": factors,
    "guarded": guarded,
    "chained": chained,
}


def loops(source: Source) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The target of every ``for``, and the values that it goes over."""
    for loop in source.nodes(ast.For, ast.AsyncFor, ast.comprehension):
        yield loop.target, loop.iter


def inside_their_kind(source: Source, kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    """Expressions of these kinds that stand in another of them, in the order of the file."""
    inner = [
        node for outer in source.nodes(*kinds) for node in ast.walk(outer) if node is not outer
    ]
    yield from dict.fromkeys(node for node in inner if isinstance(node, kinds))


def is_slice(value: ast.expr) -> bool:
    """True for ``several[:5]``."""
    return isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)


def is_tuple(value: ast.expr) -> bool:
    """True for a tuple or list that is written out; a conditional expression is, if both branches are."""
    if isinstance(value, ast.IfExp):
        return is_tuple(value.body) and is_tuple(value.orelse)
    return isinstance(value, (ast.Tuple, ast.List))


def n_names(target: ast.expr) -> int:
    """How many names, attributes and items a target assigns."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return sum(map(n_names, target.elts))
    return 1


def is_packed(value: ast.expr, source: Source, seen: frozenset[ast.AST] = frozenset()) -> bool:
    """True for a tuple of things that were single before, and for a name or attribute that stands for one.

    Tuples that only join others, ``(*first, *second)``, are none, and constants of a module or class are tables. A name
    that stands for a list is none either: the list may have grown. ``seen`` ends circles of names.
    """
    if value in seen:
        return False
    seen |= {value}
    if isinstance(value, (ast.Tuple, ast.List)):
        return any(
            not isinstance(each, ast.Starred) or is_packed(each.value, source, seen)
            for each in value.elts
        )
    parts = parts_of(value)
    if not parts:
        parts = [each for each in source.stands_for(value) if not isinstance(each, ast.List)]
    return any(is_packed(part, source, seen) for part in parts)


def parts_of(value: ast.expr) -> list[ast.expr]:
    """Expressions whose value, or sum, this one is."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.BoolOp):
        return value.values
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [value.left, value.right]
    return [value.value] if isinstance(value, ast.NamedExpr) else []


def is_boolean(value: ast.expr) -> bool:
    """True for comparisons and ``not``, also after a sign and joined by ``and`` and ``or``."""
    if isinstance(value, ast.BoolOp):
        return any(map(is_boolean, value.values))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not) or is_boolean(value.operand)
    return isinstance(value, ast.Compare)


def is_empty(value: ast.expr) -> bool:
    """True for ``()``, ``[]``, ``{}``, an empty text and ``tuple()``."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in EMPTY and not value.args and not value.keywords
    return ast.unparse(value) in ("()", "[]", "{}", "''")


def branches(value: ast.expr) -> list[ast.expr]:
    """What a conditional expression may be, through those in its branches."""
    if isinstance(value, ast.IfExp):
        return [*branches(value.body), *branches(value.orelse)]
    return [value]


def iterated(values: ast.expr) -> list[ast.expr]:
    """What a loop goes over, also through ``enumerate``, ``zip`` and their like."""
    if isinstance(values, ast.Call) and ast.unparse(values.func) in ITERATES:
        return [each for argument in values.args for each in iterated(argument)]
    return [values]
