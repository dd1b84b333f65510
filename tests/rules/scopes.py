"""Scopes of Python sources: which names a function, class or comprehension binds, where, and to which expressions."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
RUN_WHOLE = (ast.Module, ast.ClassDef, ast.With, ast.AsyncWith, *FUNCTIONS)
"""What has a body of which no statement is left out."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Binding:
    """One place that gives a name its value."""

    name: str
    kind: str  # parameter, loop, assignment, addition, definition, import, other
    position: tuple[int, int]  # from which the name has the value: line and column
    block: tuple[int, ...]  # branches and loop bodies around, from the outermost
    values: tuple[
        ast.expr, ...
    ] = ()  # expressions that the name may stand for; none if they are not known
    node: ast.AST | None = None  # definition, import or parameter


@dataclass(eq=False)
class Scope:
    """A module, class, function, lambda or comprehension with the names that it binds.

    ``name`` is that of the function or class with those around it, empty for a module.
    """

    node: ast.AST
    name: str = ""
    parent: "Scope | None" = None
    bindings: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))

    def lookup(self, name: str) -> "Scope | None":
        """Find the scope whose name this is, as Python does: classes are left out from inside functions."""
        scope: Scope | None = self
        while scope is not None:
            is_visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if is_visible and name in scope.bindings:
                return scope
            scope = scope.parent
        return None

    def owner(self, name: str) -> ast.ClassDef | None:
        """The class whose object, or which itself, a method gets under this name: that of its first parameter."""
        home = self.lookup(name)
        if (
            home is None
            or not isinstance(home.node, (ast.FunctionDef, ast.AsyncFunctionDef))
            or home.parent is None
        ):
            return None
        places = [*home.node.args.posonlyargs, *home.node.args.args]
        is_first = (
            bool(places) and places[0].arg == name and not is_decorated(home.node, "staticmethod")
        )
        return home.parent.node if is_first and isinstance(home.parent.node, ast.ClassDef) else None

    def class_around(self) -> ast.ClassDef | None:
        """The innermost class around."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope.node if scope is not None else None


@dataclass(frozen=True)
class Site:
    """Where a node stands: its scope, and the branches and loop bodies around."""

    scope: Scope
    block: tuple[int, ...]


class Source:
    """A parsed file with the site of every node and the bindings of every scope."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.module = Scope(self.tree)
        self.sites: dict[ast.AST, Site] = {}
        self.attributes: dict[tuple[ast.ClassDef, str], list[ast.expr]] = defaultdict(list)
        self._scope = self.module
        self._block: tuple[int, ...] = ()
        self._outer: dict[tuple[Scope, str], Scope] = {}
        self._visit(self.tree)

    def nodes(self, *kinds: type) -> Iterator[Any]:
        """All nodes of these kinds, in the order of the file."""
        return (node for node in self.sites if isinstance(node, kinds))

    def scopes(self) -> list[Scope]:
        """All scopes, the module first."""
        return list(dict.fromkeys([self.module, *(site.scope for site in self.sites.values())]))

    def reaching(self, name: ast.Name) -> list[Binding]:
        """Bindings that a name may stand for where it is read.

        A binding is dropped if a later one, before the read, stands in a block around the read. Of names of outer
        scopes all bindings reach.
        """
        site = self.sites[name]
        scope = site.scope.lookup(name.id)
        if scope is None:
            return []
        bindings = scope.bindings[name.id]
        if scope is not site.scope and scope.node not in _functions_around(site.scope):
            return bindings
        before = [
            binding for binding in bindings if binding.position < (name.lineno, name.col_offset)
        ]
        always = [
            b for b in before if b.block == site.block[: len(b.block)] and b.kind != "addition"
        ]
        overwrites = [binding.position for binding in always]
        return [
            binding for binding in before if binding.position >= max(overwrites, default=(0, 0))
        ] or bindings

    def stands_for(self, value: ast.expr) -> list[ast.expr]:
        """Expressions that a local name, or an attribute of the own object, was set to."""
        scope = self.sites[value].scope
        if isinstance(value, ast.Name):
            home = scope.lookup(value.id)
            is_local = home is not None and isinstance(home.node, (*FUNCTIONS, *COMPREHENSIONS))
            bindings = self.reaching(value) if is_local else []
            return [each for binding in bindings for each in binding.values]
        owner = self.own_class(value.value) if isinstance(value, ast.Attribute) else None
        return self.attributes.get((owner, value.attr), []) if owner is not None else []

    def own_class(self, value: ast.expr) -> ast.ClassDef | None:
        """The class around, if the value is the object, or class, that a method gets first."""
        return self.sites[value].scope.owner(value.id) if isinstance(value, ast.Name) else None

    def is_object(self, value: ast.expr) -> bool:
        """True for ``self``, where ``own_class`` knows ``cls`` too."""
        if not isinstance(value, ast.Name) or self.own_class(value) is None:
            return False
        home = self.sites[value].scope.lookup(value.id)
        return home is not None and not is_decorated(home.node, "classmethod")

    def _visit(self, node: ast.AST) -> None:
        self.sites[node] = Site(self._scope, self._block)
        VISITORS.get(type(node), Source._parts)(self, node)

    def _parts(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            self._visit_field(node, name, value)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name, "definition", node, node=node)
        for outside in [*node.decorator_list, *_defaults(node.args), *_annotations(node)]:
            self._visit(outside)
        self._enter(node, node.name)
        self._parameters(node.args)
        self._visit_field(node, "body", node.body)
        self._leave()

    def _lambda(self, node: ast.Lambda) -> None:
        for default in _defaults(node.args):
            self._visit(default)
        self._enter(node)
        self._parameters(node.args)
        self._visit(node.body)
        self._leave()

    def _class(self, node: ast.ClassDef) -> None:
        self._bind(node.name, "definition", node, node=node)
        for outside in [*node.decorator_list, *node.bases, *node.keywords]:
            self._visit(outside)
        self._enter(node, node.name)
        self._visit_field(node, "body", node.body)
        self._leave()

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        first = node.generators[0]
        self._visit(first.iter)
        self._enter(node)
        for generator in node.generators:
            if generator is not first:
                self._visit(generator.iter)
            self._bind_target(
                generator.target, "loop", generator.iter, values=_elements(generator.iter)
            )
            self.sites[generator] = Site(self._scope, self._block)
            for part in [generator.target, *generator.ifs]:
                self._visit(part)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for element in elements:
            self._visit(element)
        self._leave()

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind_target(target, "assignment", node.value, values=(node.value,))
        self._parts(node)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind_target(node.target, "assignment", node.value, values=(node.value,))
        elif isinstance(node.target, ast.Name):
            self._bind(node.target.id, "other", node)
        self._parts(node)

    def _augmented(self, node: ast.AugAssign) -> None:
        self._bind_target(node.target, "addition", node.value, values=(node.value,))
        self._parts(node)

    def _named(self, node: ast.NamedExpr) -> None:
        inner = self._scope
        while isinstance(self._scope.node, COMPREHENSIONS) and self._scope.parent is not None:
            self._scope = self._scope.parent
        self._bind_target(node.target, "assignment", node.value, values=(node.value,))
        self._scope = inner
        self._parts(node)

    def _loop(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind_target(node.target, "loop", node.iter, values=_elements(node.iter))
        self._parts(node)

    def _with(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._bind_target(node.optional_vars, "other", node.optional_vars, values=())
        self._parts(node)

    def _named_by_text(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name is not None:
            self._bind(node.name, "other", node)
        self._parts(node)

    def _rest(self, node: ast.MatchMapping) -> None:
        if node.rest is not None:
            self._bind(node.rest, "other", node)
        self._parts(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.split(".")[0], "import", node, node=node)

    def _outer_names(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            outer = self._scope.parent.lookup(name) if self._scope.parent is not None else None
            is_global = isinstance(node, ast.Global) or outer is None
            self._outer[self._scope, name] = self.module if is_global else outer

    def _visit_field(self, node: ast.AST, name: str, value: Any) -> None:
        if isinstance(value, ast.AST):
            self._visit(value)
        if not isinstance(value, list):
            return
        outer = self._block
        always = name == "body" and isinstance(node, RUN_WHOLE)
        if value and isinstance(value[0], ast.stmt) and not always:
            self._block = (*outer, id(value))
        for part in value:
            if isinstance(part, ast.AST):
                self._visit(part)
        self._block = outer

    def _enter(self, node: ast.AST, name: str = "") -> None:
        names = [part for part in (self._scope.name, name) if part]
        self._scope = Scope(node, ".".join(names), self._scope)

    def _leave(self) -> None:
        assert self._scope.parent is not None
        self._scope = self._scope.parent

    def _parameters(self, arguments: ast.arguments) -> None:
        for argument in parameters(arguments):
            self._bind(argument.arg, "parameter", argument, node=argument)

    def _bind(
        self,
        name: str,
        kind: str,
        place: Any,
        values: tuple[ast.expr, ...] = (),
        node: ast.AST | None = None,
    ) -> None:
        scope = self._outer.get((self._scope, name), self._scope)
        is_value = kind in ("assignment", "addition", "loop")
        position = (
            (place.end_lineno, place.end_col_offset)
            if is_value
            else (place.lineno, place.col_offset)
        )
        scope.bindings[name].append(
            Binding(name, kind, position, block=self._block, values=values, node=node)
        )

    def _bind_target(
        self, target: ast.expr, kind: str, place: ast.expr, values: tuple[ast.expr, ...]
    ) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, kind, place, values=values)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, kind, place, values=())
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self._bind_attribute(target.value, target.attr, values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            rows = [value for value in values if _is_row(value, len(target.elts))]
            has_star = any(isinstance(part, ast.Starred) for part in target.elts)
            for i, part in enumerate(target.elts):
                self._bind_target(
                    part, kind, place, values=() if has_star else tuple(row.elts[i] for row in rows)
                )

    def _bind_attribute(self, owner: ast.Name, name: str, values: tuple[ast.expr, ...]) -> None:
        class_of_owner = self._scope.owner(owner.id)
        if class_of_owner is not None:
            self.attributes[class_of_owner, name] += values


VISITORS: dict[type, Callable[[Source, Any], None]] = {
    ast.FunctionDef: Source._function,
    ast.AsyncFunctionDef: Source._function,
    ast.Lambda: Source._lambda,
    ast.ClassDef: Source._class,
    ast.ListComp: Source._comprehension,
    ast.SetComp: Source._comprehension,
    ast.DictComp: Source._comprehension,
    ast.GeneratorExp: Source._comprehension,
    ast.Assign: Source._assign,
    ast.AnnAssign: Source._annotated,
    ast.AugAssign: Source._augmented,
    ast.NamedExpr: Source._named,
    ast.For: Source._loop,
    ast.AsyncFor: Source._loop,
    ast.withitem: Source._with,
    ast.ExceptHandler: Source._named_by_text,
    ast.MatchAs: Source._named_by_text,
    ast.MatchStar: Source._named_by_text,
    ast.MatchMapping: Source._rest,
    ast.Import: Source._import,
    ast.ImportFrom: Source._import,
    ast.Global: Source._outer_names,
    ast.Nonlocal: Source._outer_names,
}
"""What binds names, with the method that writes them down; of all else only the parts are visited."""


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters of a function, those with stars too."""
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]


def is_decorated(node: ast.AST, *names: str) -> bool:
    """Whether a decorator has one of these last names: ``@dataclass``, ``@dataclasses.dataclass(frozen=True)``."""
    decorators = getattr(node, "decorator_list", [])
    called = [each.func if isinstance(each, ast.Call) else each for each in decorators]
    return any(ast.unparse(each).split(".")[-1] in names for each in called)


def _functions_around(scope: Scope) -> list[ast.AST]:
    """Lambdas and comprehensions around a scope, and the function or module in which they run at once."""
    around = [scope.node]
    while isinstance(scope.node, COMPREHENSIONS) and scope.parent is not None:
        scope = scope.parent
        around.append(scope.node)
    return around


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [
        default for default in [*arguments.defaults, *arguments.kw_defaults] if default is not None
    ]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    notes = [argument.annotation for argument in parameters(node.args)]
    return [note for note in [*notes, node.returns] if note is not None]


def _elements(values: ast.expr) -> tuple[ast.expr, ...]:
    """What a loop over a tuple, list or set that is written out goes over."""
    written = isinstance(values, (ast.Tuple, ast.List, ast.Set))
    return (
        tuple(each for each in values.elts if not isinstance(each, ast.Starred)) if written else ()
    )


def _is_row(value: ast.expr, n: int) -> bool:
    is_written = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == n
    return is_written and not any(isinstance(each, ast.Starred) for each in value.elts)
