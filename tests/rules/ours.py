"""Functions and classes of a package: which of them a call means, and which attributes its classes declare."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from tests.rules.scopes import Binding, Source, is_decorated

WITHOUT_NAMES = 3
"""So many arguments of a call need no names."""
UNKNOWN = {"typing.Any", "collections.abc.Callable"}
"""Annotations that tell nothing of an object."""


@dataclass(frozen=True)
class Function:
    """A function as a call sees it: whether ``self`` or ``cls`` is filled by the call, or the first argument."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    file: str
    fills_first: bool = False
    takes_self: bool = False


@dataclass(frozen=True)
class Class:
    """A class of the package, and the file that it stands in."""

    node: ast.ClassDef
    file: str = ""

    @property
    def is_record(self) -> bool:
        """Whether fields are the parameters of its constructor."""
        bases = [ast.unparse(base).split(".")[-1] for base in self.node.bases]
        return is_decorated(self.node, "dataclass") or "NamedTuple" in bases

    def method(self, name: str, of_object: bool) -> Function | None:
        """A function that the class itself defines, as its objects see it, or as the class does."""
        for node in self.node.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                is_static = is_decorated(node, "staticmethod")
                is_bound = of_object or is_decorated(node, "classmethod")
                fills_first, takes_self = is_bound and not is_static, not is_bound and not is_static
                return Function(node, self.file, fills_first=fills_first, takes_self=takes_self)
        return None


@dataclass(frozen=True)
class Other:
    """A module, of the package or not, or something of a module that is not of the package, by its full name."""

    name: str


Meaning = Function | Class | Other


class Ours:
    """What the files of a package define, by name."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self.files = {module_name(file): file for file in sources}
        self.methods: dict[str, list[Function]] = defaultdict(list)
        self.declared: dict[str, set[ast.ClassDef]] = defaultdict(set)
        self.foreign_parents: set[str] = set()
        self._under_way: set[ast.expr] = set()
        for file, source in sources.items():
            for node in source.nodes(ast.ClassDef):
                self._add(Class(node, file))
            for node, attribute in source.attributes:
                self.declared[attribute].add(node)
        for file, source in sources.items():
            for node in source.nodes(ast.ClassDef):
                parents = self._parents(Class(node, file))
                self.foreign_parents |= {
                    parent.name for parent in parents if isinstance(parent, Other)
                }

    def unnamed(self, file: str) -> Iterator[ast.AST]:
        """Calls of functions and classes of ours that leave out the name of an argument after the third."""
        source = self.sources[file]
        for call in source.nodes(ast.Call):
            function, arguments = call.func, call.args
            if ast.unparse(function) in ("partial", "functools.partial") and arguments:
                function, *arguments = arguments
            n = sum(n_places(argument, source) for argument in arguments)
            called = self.meanings(function, file) if n > WITHOUT_NAMES else []
            if called and all(self._could_name(each, n) for each in called):
                yield call

    def set_outside(self, file: str) -> Iterator[ast.AST]:
        """``other.name = value`` where ``name`` is declared by a class of ours, but not by the class around."""
        source = self.sources[file]
        for node in source.nodes(ast.Attribute):
            if isinstance(node.ctx, ast.Store) and self._is_of_other(node.value, node.attr, file):
                yield node
        for call in source.nodes(ast.Call):
            match call:
                case ast.Call(func=ast.Name("setattr"), args=[owner, ast.Constant(str(name)), _]):
                    if self._is_of_other(owner, name, file):
                        yield call

    def meanings(self, value: ast.expr, file: str) -> list[Meaning]:
        """All that an expression may mean; nothing if one of it is not known."""
        source = self.sources[file]
        if isinstance(value, ast.Name):
            owner = source.own_class(value)
            return (
                [Class(owner, file)]
                if owner is not None
                else self._bound(source.reaching(value), file)
            )
        if not isinstance(value, ast.Attribute):
            return []
        around = source.sites[value].scope.class_around()
        if around is not None and ast.unparse(value.value) == "super()":
            parents = self._line(Class(around, file))[1:]
            return self._method(parents, value.attr, of_object=True)
        owners = self.meanings(value.value, file)
        if owners and not any(isinstance(owner, Function) for owner in owners):
            of_object = source.is_object(value.value)
            return self._of_all(self._attribute(owner, value.attr, of_object) for owner in owners)
        kind = self.type_of(value.value, file)
        if kind is not None:
            return self._attribute(kind, value.attr, of_object=True)
        is_field = value.attr in self.declared  # which may hold any function
        return [] if is_field else list(self.methods.get(value.attr, []))

    def type_of(self, value: ast.expr, file: str) -> Class | Other | None:
        """The class of an object by annotations and by calls of constructors; ``None`` if these do not tell one.

        A class of another package that one of ours inherits from tells nothing: the object may be one of ours.
        """
        if value in self._under_way:
            return None
        self._under_way.add(value)
        kinds = set(self._types(value, file))
        self._under_way.remove(value)
        kind = kinds.pop() if len(kinds) == 1 else None
        return (
            None
            if isinstance(kind, Other) and kind.name in self.foreign_parents | UNKNOWN
            else kind
        )

    def _types(self, value: ast.expr, file: str) -> Iterator[Class | Other | None]:
        source = self.sources[file]
        if isinstance(value, ast.Name):
            own = source.own_class(value)
            if own is not None:
                yield Class(own, file)
            else:
                yield from (
                    self._type_of_binding(binding, file) for binding in source.reaching(value)
                )
        elif isinstance(value, ast.Call):
            for called in self.meanings(value.func, file):
                yield (
                    self._annotated(called.node.returns, called.file)
                    if isinstance(called, Function)
                    else called
                )
        elif isinstance(value, ast.Attribute):
            owner = self.type_of(value.value, file)
            if isinstance(owner, Class):
                yield from self._types_of_field(owner, value.attr)
        elif isinstance(value, ast.Await):
            yield self.type_of(value.value, file)

    def _type_of_binding(self, binding: Binding, file: str) -> Class | Other | None:
        if isinstance(binding.node, ast.arg):
            return self._annotated(binding.node.annotation, file)
        is_single = binding.kind == "assignment" and len(binding.values) == 1
        return self.type_of(binding.values[0], file) if is_single else None

    def _types_of_field(self, owner: Class, name: str) -> Iterator[Class | Other | None]:
        for each in self._line(owner):
            declared = [node for node in each.node.body if isinstance(node, ast.AnnAssign)]
            notes = [node.annotation for node in declared if ast.unparse(node.target) == name]
            method = each.method(name, of_object=True)
            if method is not None and is_decorated(method.node, "property", "cached_property"):
                notes.append(method.node.returns)
            if notes:
                yield self._annotated(notes[0], each.file)
            else:
                values = self.sources[each.file].attributes.get((each.node, name), [])
                yield from (self.type_of(value, each.file) for value in values)

    def _annotated(self, note: ast.expr | None, file: str) -> Class | Other | None:
        """What an annotation names, without ``None``; nothing for other unions, and for what is a list or dict."""
        if isinstance(note, ast.Constant) and isinstance(note.value, str):
            note = ast.parse(note.value, mode="eval").body
        if isinstance(note, ast.BinOp):
            sides = [side for side in (note.left, note.right) if ast.unparse(side) != "None"]
            return self._annotated(sides[0], file) if len(sides) == 1 else None
        if isinstance(note, ast.Attribute):
            owner = self._annotated(note.value, file)
            several = self._of_module(owner.name, note.attr) if isinstance(owner, Other) else []
        else:
            bindings = (
                self.sources[file].module.bindings.get(note.id, [])
                if isinstance(note, ast.Name)
                else []
            )
            several = self._bound(bindings, file)
        return next((each for each in several if not isinstance(each, Function)), None)

    def _attribute(self, owner: Meaning, name: str, of_object: bool) -> list[Meaning]:
        if isinstance(owner, Class):
            return self._method(self._line(owner), name, of_object)
        assert isinstance(owner, Other)
        return self._of_module(owner.name, name)

    def _of_module(self, module: str, name: str) -> list[Meaning]:
        """What a module calls by a name; of other packages only the full name is known."""
        whole = f"{module}.{name}"
        if whole in self.files or module not in self.files:
            return [Other(whole)]
        file = self.files[module]
        return self._bound(self.sources[file].module.bindings.get(name, []), file)

    def _bound(self, bindings: list[Binding], file: str) -> list[Meaning]:
        return self._of_all(self._defined(binding, file) for binding in bindings)

    def _defined(self, binding: Binding, file: str) -> list[Meaning]:
        node = binding.node
        if isinstance(node, ast.ClassDef):
            return [Class(node, file)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [Function(node, file)]
        if isinstance(node, ast.Import):
            is_whole = binding.name not in [
                alias.name.split(".")[0] for alias in node.names if not alias.asname
            ]
            names = [alias.name for alias in node.names if alias.asname == binding.name]
            return [Other(names[0] if is_whole else binding.name)]
        if isinstance(node, ast.ImportFrom):
            names = [
                alias.name for alias in node.names if binding.name in (alias.asname, alias.name)
            ]
            return self._of_module(str(node.module), names[0])
        return []

    @staticmethod
    def _of_all(several: Iterator[list[Meaning]]) -> list[Meaning]:
        """All of them, or nothing if one is not known."""
        known = list(several)
        return [each for one in known for each in one] if all(known) else []

    def _line(self, first: Class) -> list[Class]:
        """A class with those of ours that it inherits from, in the order in which methods are looked up."""
        parents = [
            each for each in self._parents(first) if isinstance(each, Class) and each != first
        ]
        return [first, *(each for parent in parents for each in self._line(parent))]

    def _parents(self, child: Class) -> list[Meaning]:
        bases = [
            base.value if isinstance(base, ast.Subscript) else base for base in child.node.bases
        ]
        return [each for base in bases for each in self.meanings(base, child.file)]

    @staticmethod
    def _method(line: list[Class], name: str, of_object: bool) -> list[Meaning]:
        methods = [method for each in line if (method := each.method(name, of_object)) is not None]
        return list(methods[:1])

    def _could_name(self, called: Meaning, n: int) -> bool:
        """Whether one of the arguments after the third goes to a parameter that has a name."""
        if isinstance(called, Function):
            arguments = called.node.args
            named = range(
                len(arguments.posonlyargs), len(arguments.posonlyargs) + len(arguments.args)
            )
            later = range(WITHOUT_NAMES + called.takes_self, n)
            return any(called.fills_first + i in named for i in later)
        if isinstance(called, Class):
            for each in self._line(called):
                constructor = each.method("__init__", of_object=True)
                if constructor is not None:
                    return self._could_name(constructor, n)
                if each.is_record:
                    return True
        return False

    def _is_of_other(self, owner: ast.expr, attribute: str, file: str) -> bool:
        """Whether this sets an attribute of ours on another object, as far as names tell.

        The context of an autograd function, modules, and objects of other packages by their imported name are none of
        ours; an attribute that only the class around declares is one of its own objects.
        """
        source = self.sources[file]
        classes = self.declared.get(attribute, set())
        if not classes or source.own_class(owner) is not None or ast.unparse(owner) == "ctx":
            return False
        kinds = [*self.meanings(owner, file), self.type_of(owner, file)]
        is_foreign = any(isinstance(each, Other) for each in kinds)
        return not is_foreign and classes != {source.sites[owner].scope.class_around()}

    def _add(self, added: Class) -> None:
        for node in added.node.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                method = added.method(node.name, of_object=True)
                if method is not None:
                    self.methods[node.name].append(method)
                if is_decorated(node, "setter"):
                    self.declared[node.name].add(added.node)
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            for target in targets:
                if isinstance(target, ast.Name):
                    self.declared[target.id].add(added.node)


def module_name(file: str) -> str:
    """The full name of the module in a file: ``openppo.models`` for ``openppo/models/__init__.py``."""
    parts = PurePath(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def n_places(argument: ast.expr, source: Source) -> int:
    """How many parameters an argument fills for sure: with a star, the length of a tuple that is known."""
    if not isinstance(argument, ast.Starred):
        return 1
    values = [argument.value, *source.stands_for(argument.value)]
    known = [len(value.elts) for value in values if isinstance(value, ast.Tuple)]
    return min(known, default=0)
