"""No packed forms in ``openppo/`` but those in form_exceptions.txt, and what is one by examples written by hand."""

from textwrap import dedent

import pytest

from tests.rules import form_list
from tests.rules.form_list import LIST, Entry, Key
from tests.rules.forms import VAGUE, Place, places

MOST_PACKED, MOST_OUTSIDE = 25, 11
"""Forms that the list may hold: packed ones, and attributes set outside, which go with the builder."""


def forms(source, file="openppo/one.py", **others):
    """Forms and functions of a source, which may import from ``others``, modules of the same package by name."""
    files = {file: dedent(source)} | {
        f"openppo/{name}.py": dedent(text) for name, text in others.items()
    }
    return [(place.form, place.function) for place in places(files) if place.file == file]


def is_form(form, source, **others):
    assert [name for name, _ in forms(source, **others)] == [form]


def is_none(source, **others):
    assert forms(source, **others) == []


def in_function(source):
    return f"def work(a, b, c, *args, **options):\n{source and dedent(source).strip()}".replace(
        "\n", "\n    "
    )


STARS = [
    "pair = a, b\nreturn call(*pair)",
    "pair = (a, b) if c else (b, a)\nreturn call(c, *pair, flag=True)",
    "pair, other = (a, b), c\nreturn call(*pair)",
    "pair = (a,) + tuple(c)\nreturn call(*pair)",
    "pair = (a,)\npair += (b,)\nreturn call(*pair)",
    "pair = (a, *c)\nreturn call(*pair)",
    "several = pair = a, b\nreturn call(*pair)",
    "pair = a, b\nreturn call(*(*pair, c))",
    "return call(*(a, b))",
    "return call(*((a, b) if c else ()))",
    "return call(*[a, b])",
    "return call(*a[:2])",
    "return call(*(a[1:]))",
    "return [call(*pair) for pair in ((a, b), (b, c))]",
    "for pair in [(a, b), (b, c)]:\n    call(*pair)",
    "if a:\n    pair = a, b\nelse:\n    pair = load()\nreturn call(*pair)",
    "pair = load()\nif a:\n    pair = a, b\nreturn call(*pair)",
    "pair = a, b\n\ndef inner():\n    return call(*pair)\nreturn inner",
    "pair = a, b\nreturn lambda: call(*pair)",
    "return call(*(pair := (a, b)))",
    "pair = a, b\nfor each in c:\n    call(*pair)",
    "while a:\n    call(*pair)\n    pair = a, b",
]
NO_STARS = [
    "return call(*args)",
    "return call(*args, **options)",
    "pair = load(a)\nreturn call(*pair)",
    "return call(*load(a, b))",
    "return call(*(load(each) for each in a))",
    "return zip(*[load(each) for each in a])",
    "return call(*a.fields)",
    "pair = a, b\nreturn pair",
    "pair = a, b\npair = load(pair)\nreturn call(*pair)",
    "pair = a, b\nkeep(pair)\nif c:\n    pair = load()\n    return call(*pair)",
    "command = ['git', 'log']\ncommand.append(a)\nreturn run(*command)",
    "whole = (*a, *b)\nreturn call(*whole)",
    "pair = a, b\n\ndef inner(pair):\n    return call(*pair)\nreturn inner, pair",
    "pair = a, b\nreturn [call(*pair) for pair in c], pair",
    "def inner():\n    pair = a, b\n    return pair\npair = load()\nreturn call(*pair)",
    "return [*a, *b], (*a, c)",
    "first, *several = a, b\nreturn call(*several)",
    "pair = (*a, *pair)\nreturn call(*pair)",
]
PACKS = [
    "x, y, z = a, b, c",
    "x, y, z, w = a, b, c, 0",
    "a.x, a.y, b[0] = b, c, 0",
    "x, y, z = *b, c",
    "x, (y, z) = a, load(b)",
    "[x, y, z] = [a, b, c]",
    "whole = x, y, z = a, b, c",
    "x, y, z = (a, b, c) if a else (c, b, a)",
    "for x, y, z in [(a, b, c)]:\n    call(x, y, z)",
    "return [x + y + z for x, y, z in ((a, b, c),)]",
]
NO_PACKS = [
    "x, y, z = load(a)",
    "x, y, z = a",
    "x, y, *z = a",
    "x, y = a, b",
    "x = y = z = a",
    "x = a, b, c",
    "x, y, z = (load(each) for each in a)",
    "x, y, z = load(a) if a else (None, None, None)",
    "for x, y, z in [(a, b, c), (c, b, a)]:\n    call(x, y, z)",
    "for x, y, z in zip(a, b, c):\n    call(x, y, z)",
]
NESTED = [
    "return [[x for x in row] for row in a]",
    "return {x: sum(y for y in a[x]) for x in b}",
    "return [x for x in [y for y in a]]",
    "return any(x in {y for y in b} for x in a)",
    "return [(lambda: [y for y in x]) for x in a]",
]
NOT_NESTED = [
    "return [x for row in a for x in row]",
    "return [x for x in a], [y for y in b]",
    "return sum(x for x in a) * sum(y for y in b)",
    "rows = [x for x in a]\nreturn [load(rows, y) for y in b]",
    "return [load(x, [1, 2]) for x in a]",
]
FACTORS = [
    "return a * (b == c)",
    "return (not a) * b",
    "return 's' * (a > 1)",
    "return a * (b > 0 and c)",
    "return a * -(b == c)",
    "return a * b * (c is None)",
    "a *= b in c",
    "return a * ~(b == c)",
]
NO_FACTORS = [
    "return a * b",
    "return a * 0.5 * c.mean()",
    "return a * (b or 1)",
    "return (a == b) + (b == c)",
    "return a * (b == c).float()",
    "return a * (b if b == c else 0)",
    "return (a * b) == c",
    "return not a * b",
    "return a * load(b == c)",
    "a += b == c",
]
GUARDED = [
    "for x in a if b else ():\n    call(x)",
    "for x in () if b else a:\n    call(x)",
    "for x in a if b else []:\n    call(x)",
    "for x in {} if b else a:\n    call(x)",
    "for x in tuple() if b else a:\n    call(x)",
    "return [x for x in (a if b else ())]",
    "return {x: y for x in a for y in (() if b else c)}",
    "for i, x in enumerate(a if b else ()):\n    call(i, x)",
    "for x, y in zip(a, c if b else ()):\n    call(x, y)",
]
NOT_GUARDED = [
    "for x in a if b else c:\n    call(x)",
    "for x in a if b else [c]:\n    call(x)",
    "for x in a or ():\n    call(x)",
    "if b:\n    for x in a:\n        call(x)",
    "rows = a if b else ()\nreturn rows",
    "return [x if b else () for x in a]",
    "for x in load(a if b else ()):\n    call(x)",
]
CHAINED = [
    "return 1 if a else 2 if b else 3",
    "return (1 if a else 2) if b else 3",
    "return 1 if (a if b else c) else 2",
    "return load(a if b else c) if a else 0",
    "return [x if x else b for x in a] if a else []",
    "return f'{a if b else c}' if a else ''",
]
NOT_CHAINED = [
    "return 1 if a else 2",
    "return (1 if a else 2) + (3 if b else 4)",
    "return load(1 if a else 2, 3 if b else 4)",
    "if a:\n    return 1 if b else 2\nreturn 3 if c else 4",
    "x = 1 if a else 2\nreturn x if b else 3",
]
BAD_NAMES = [
    "found = load(a)",
    "for found in a:\n    call(found)",
    "return [call(found) for found in a]",
    "return {found for found, _ in a}",
    "with load(a) as found:\n    call(found)",
    "if (found := load(a)):\n    call(found)",
    "x, found = a",
    "x, *found = a",
    "found: int = a",
    "found: int",
    "found += a",
    "return lambda found: call(found)",
    "try:\n    call(a)\nexcept OSError as found:\n    raise",
    "import json as found",
    "match a:\n    case [x, *found]:\n        call(found)",
    "match a:\n    case {'x': x, **found}:\n        call(found)",
    "def found():\n    return a",
]
GOOD_NAMES = [
    "found_rows = load(a)",
    "n_found = load(a)",
    "_found = load(a)",
    "a.found = b",
    "return call(found=a)",
    "return a.found, a['found']",
    "return found",
]


@pytest.mark.parametrize("source", STARS)
def test_star_over_packed_tuple_is_a_form(source):
    is_form("star", in_function(source))


@pytest.mark.parametrize("source", NO_STARS)
def test_star_over_parameters_results_and_grown_lists_is_none(source):
    is_none(in_function(source))


def test_star_over_packed_attribute_of_the_own_object_is_a_form():
    packed = """
        class Holder:
            def __init__(self, a, b):
                self.pair = a, b

            def call(self):
                return load(*self.pair)
        """
    is_form("star", packed)
    is_none(packed.replace("a, b\n", "load(a, b)\n"))


def test_star_over_constants_of_a_module_is_none():
    is_none("NAMES = 'a', 'b'\n\ndef work(row):\n    return first(row, *NAMES)\n")


@pytest.mark.parametrize("source", PACKS)
def test_tuple_assigned_to_three_names_is_a_form(source):
    is_form("pack", in_function(source))


@pytest.mark.parametrize("source", NO_PACKS)
def test_unpacking_one_result_is_none(source):
    is_none(in_function(source))


@pytest.mark.parametrize("source", NESTED)
def test_comprehension_in_a_comprehension_is_a_form(source):
    is_form("nested", in_function(source))


@pytest.mark.parametrize("source", NOT_NESTED)
def test_comprehension_with_two_loops_or_beside_another_is_none(source):
    is_none(in_function(source))


def test_each_inner_comprehension_counts_once():
    source = in_function("return [[[x for x in z] for z in y] + [x for x in y] for y in a]")
    assert forms(source) == [("nested", "work")] * 3


@pytest.mark.parametrize("source", FACTORS)
def test_comparison_as_factor_is_a_form(source):
    is_form("factor", in_function(source))


@pytest.mark.parametrize("source", NO_FACTORS)
def test_product_of_numbers_is_none(source):
    is_none(in_function(source))


@pytest.mark.parametrize("source", GUARDED)
def test_loop_over_something_or_nothing_is_a_form(source):
    is_form("guarded", in_function(source))


@pytest.mark.parametrize("source", NOT_GUARDED)
def test_loop_over_one_of_two_is_none(source):
    is_none(in_function(source))


@pytest.mark.parametrize("source", CHAINED)
def test_condition_in_a_condition_is_a_form(source):
    is_form("chained", in_function(source))


@pytest.mark.parametrize("source", NOT_CHAINED)
def test_conditions_beside_each_other_are_none(source):
    is_none(in_function(source))


@pytest.mark.parametrize("source", BAD_NAMES)
def test_vague_local_is_a_form(source):
    is_form("vague", in_function(source))


@pytest.mark.parametrize("source", GOOD_NAMES)
def test_longer_names_attributes_and_reads_are_none(source):
    is_none(in_function(source))


@pytest.mark.parametrize(
    "signature", ["found", "*found", "**found", "a, /, *, found", "found=0", "found: int"]
)
def test_vague_parameter_is_a_form(signature):
    is_form("vague", f"def work({signature}):\n    return 0\n")


@pytest.mark.parametrize("name", sorted(VAGUE))
def test_every_name_of_the_issue_is_vague(name):
    is_form("vague", f"def work(a):\n    {name} = a\n")


def test_vague_field_of_a_dataclass_is_a_form():
    is_form("vague", "@dataclass(frozen=True)\nclass Rows:\n    found: int\n")
    is_form("vague", "class Rows(NamedTuple):\n    found: int\n")
    is_none("class Rows:\n    found = 0\n")


def test_vague_loop_of_a_module_is_a_form_and_its_constant_none():
    is_form("vague", "for found in (1, 2):\n    print(found)\n")
    is_none("found = 1\n")


def test_a_vague_name_counts_once_a_scope():
    source = in_function(
        "found = a\nfound = b\nreturn [found for found in c], [found for found in a]"
    )
    assert forms(source) == [("vague", "work")] * 3


UNNAMED = [
    "from openppo.other import four\n\nfour(1, 2, 3, 4)\n",
    "from openppo.other import four as other\n\nother(1, 2, 3, 4, e=5)\n",
    "from openppo import other\n\nother.four(1, 2, 3, 4)\n",
    "import openppo.other\n\nopenppo.other.four(1, 2, 3, 4)\n",
    "import openppo.other as theirs\n\ntheirs.four(1, 2, 3, 4)\n",
    "from openppo.package import four\n\nfour(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nFour(1, 2, 3, 4)\n",
    "from openppo.other import Child\n\nChild(1, 2, 3, 4)\n",
    "from openppo.other import Record\n\nRecord(1, 2, 3, 4)\n",
    "from openppo.other import Row\n\nRow(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nFour.made_of(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nFour.static(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nFour.method(Four(), 1, 2, 3, 4)\n",
    "def work(x):\n    return x.method(1, 2, 3, 4)\n",
    "def work(x):\n    return x.parts[0].method(1, 2, 3, 4)\n",
    "from functools import partial\nfrom openppo.other import four\n\npartial(four, 1, 2, 3, 4)\n",
    "def work(x):\n    def inner(a, b, c, d):\n        return a\n    return inner(1, 2, 3, x)\n",
    "from openppo.other import four\n\ndef work(a):\n    return four(a, 1, 2, *load(), 3)\n",
    "class Own:\n    def own(self, a, b, c, d):\n        return self.own(a, b, c, d)\n",
    "from openppo.other import Four\n\nclass Own(Four):\n    def own(self, a):\n        super().__init__(1, 2, 3, a)\n",
    "class Own:\n    def __init__(self, a, b, c, d): ...\n\n"
    "    @classmethod\n    def of(cls):\n        return cls(1, 2, 3, 4)\n",
]
NOT_UNNAMED = [
    "from openppo.other import four\n\nfour(1, 2, 3, d=4)\n",
    "from openppo.other import four\n\nfour(*load(), **load())\n",
    "from torch import four\n\nfour(1, 2, 3, 4)\n",
    "import torch\n\ntorch.four(1, 2, 3, 4)\ntorch.other.method(1, 2, 3, 4)\n",
    "from openppo.other import variadic\n\nvariadic(1, 2, 3, 4, 5)\n",
    "from openppo.other import by_place\n\nby_place(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nFour(1, 2, 3)\n",
    "from openppo.other import Four\n\nFour.method(Four(), 1, 2, 3)\n",
    "from openppo.other import Foreign\n\nForeign(1, 2, 3, 4)\n",
    "from openppo.other import Foreign\n\nForeign.apply(1, 2, 3, 4)\n",
    "def work(x):\n    return x.unknown(1, 2, 3, 4)\n",
    "def work(x):\n    return x.method(1, 2, 3)\n",
    "def work(x):\n    return x.differs(1, 2, 3, 4)\n",
    "def work(x):\n    return x.field(1, 2, 3, 4)\n",
    "def work(four):\n    return four(1, 2, 3, 4)\n",
    "from openppo.other import four\n\ndef work():\n    four = load()\n    return four(1, 2, 3, 4)\n",
    "from openppo.other import four\nfrom functools import partial\n\npartial(four, 1, 2, 3)\n",
]
OTHER = """
    def four(a, b, c, d=0, e=0): ...
    def variadic(a, *several): ...
    def by_place(a, b, c, d, /): ...

    class Four:
        def __init__(self, a=0, b=0, c=0, d=0): ...
        def method(self, a, b, c, d=0): ...
        def differs(self, a, b, c, d): ...
        @classmethod
        def made_of(cls, a, b, c, d): ...
        @staticmethod
        def static(a, b, c, d): ...

    class Child(Four): ...

    class Differs:
        field: Callable
        def differs(self, *several): ...
        def field(self, a, b, c, d): ...

    @dataclass
    class Record:
        a: int
        b: int
        c: int
        d: int

    class Row(NamedTuple):
        a: int
        b: int
        c: int
        d: int

    class Foreign(torch.autograd.Function):
        def forward(ctx, a, b, c, d): ...
    """
PACKAGE = "if TYPE_CHECKING:\n    from openppo.other import four as four\n"


@pytest.mark.parametrize("source", UNNAMED)
def test_fourth_argument_of_ours_without_name_is_a_form(source):
    is_form("unnamed", source, other=OTHER, **{"package/__init__": PACKAGE})


@pytest.mark.parametrize("source", NOT_UNNAMED)
def test_named_arguments_and_functions_of_others_are_none(source):
    is_none(source, other=OTHER, **{"package/__init__": PACKAGE})


def test_star_over_a_tuple_of_known_length_counts_its_arguments():
    source = "from openppo.other import four\n\ndef work(a):\n    pair = a, 1\n    return four(2, *pair, 3)\n"
    assert forms(source, other=OTHER) == [("star", "work"), ("unnamed", "work")]


TYPED = [
    "from openppo.other import Differs, Four\n\ndef work():\n    four = Four()\n    four.differs(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\ndef work(four: Four):\n    four.differs(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\ndef work(four: 'Four | None'):\n    four.differs(1, 2, 3, 4)\n",
    "from openppo import other\n\ndef work(four: other.Four):\n    four.differs(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\n@dataclass\nclass Holder:\n    four: Four\n\n"
    "def work(holder: Holder):\n    holder.four.differs(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\nclass Holder:\n    def __init__(self):\n        self.four = Four()\n\n"
    "    def work(self):\n        self.four.differs(1, 2, 3, 4)\n",
    "from openppo.other import Four\n\ndef load() -> Four: ...\n\nload().differs(1, 2, 3, 4)\n",
]


@pytest.mark.parametrize("source", TYPED)
def test_method_of_an_object_whose_class_is_known_is_that_of_the_class(source):
    is_form("unnamed", source, other=OTHER)
    is_none(source.replace("Four", "Differs"), other=OTHER)


def test_method_of_an_object_of_another_package_is_none():
    source = "from torch import Tensor, nn\n\ndef work(x: Tensor):\n    x.method(1, 2, 3, 4)\n"
    is_none(source, other=OTHER)
    is_form("unnamed", source.replace("x: Tensor", "x"), other=OTHER)


def test_object_of_a_foreign_class_that_ours_inherit_from_may_be_ours():
    source = "from torch import nn\n\nclass Own(nn.Module): ...\n\ndef work(x: nn.Module):\n    x.method(1, 2, 3, 4)\n"
    is_form("unnamed", source, other=OTHER)


DECLARES = """
    @dataclass
    class Declared:
        field: int = 0

        def __init__(self):
            self.name = 0
            self.n = 0

        @property
        def size(self): ...

        @size.setter
        def size(self, value): ...

        def method(self): ...
    """
OUTSIDE = [
    "def work(x):\n    x.name = 1\n",
    "def work(x):\n    x.n += 1\n",
    "def work(x):\n    x.field = 1\n",
    "def work(x):\n    x.size = 1\n",
    "def work(x):\n    x.parts[0].name = 1\n",
    "def work(x):\n    x.name, y = 1, 2\n",
    "def work(x):\n    for x.name in y:\n        pass\n",
    "def work(x):\n    setattr(x, 'name', 1)\n",
    "class Other:\n    def __init__(self, x):\n        self.x = x\n        self.x.name = 1\n",
    "class Other:\n    def __init__(self, x):\n        self.name = 1\n        x.name = 1\n",
    "from openppo.other import current\n\ncurrent.name = 1\n",
]
INSIDE = [
    "class Other:\n    def __init__(self):\n        self.name = 1\n        self.n += 1\n",
    "class Other:\n    @classmethod\n    def of(cls):\n        cls.name = 1\n",
    "class Other:\n    def work(self):\n        def inner():\n            self.name = 1\n        return inner\n",
    "def work(x):\n    x.unknown = 1\n",
    "def work(x):\n    x.method = 1\n",
    "def work(x):\n    return x.name, x.n\n",
    "def work(x):\n    x.name[0] = 1\n    x.name.append(2)\n",
    "import sys\n\nsys.name = 1\n",
    "from transformers import utils\n\nutils.name = 1\n",
    "from openppo import other\n\nother.name = 1\n",
    "from torch import Tensor\n\ndef work(x: Tensor):\n    x.name = 1\n",
    "class Function(torch.autograd.Function):\n    def forward(ctx, x):\n        ctx.name = x\n",
    "class Other:\n    def copy(self):\n        new = Other()\n        new.only = 1\n        return new\n\n"
    "    def __init__(self):\n        self.only = 0\n",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_attribute_of_ours_set_on_another_object_is_a_form(source):
    is_form("outside", source, other=DECLARES)


@pytest.mark.parametrize("source", INSIDE)
def test_attribute_of_the_own_object_or_of_others_is_none(source):
    is_none(source, other=DECLARES)


def test_function_of_a_place_has_its_classes_and_outer_functions():
    source = """
        x = [[y for y in z] for z in a]

        class Outer:
            rows = [[y for y in z] for z in a]

            async def method(self):
                def inner():
                    return lambda: [[y for y in z] for z in a]
        """
    assert [function for _, function in forms(source)] == ["", "Outer", "Outer.method.inner"]


LISTED = {Key("pack", "openppo/one.py::work"): Entry(2, "before the rules")}


def place(form="pack", file="openppo/one.py", function="work", line=7):
    return Place(form, file, function, line=line, code="x, y, z = a, b, c")


def test_list_reads_as_it_was_written():
    entries = LISTED | {Key("star", "openppo/two.py"): Entry(1, "a table of few rows")}
    assert form_list.read(form_list.write(entries)) == entries


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("openppo/one.py::work 2", "is no entry; write: file::function, a number, a reason."),
        (
            "openppo/one.py::work two because",
            "is no entry; write: file::function, a number, a reason.",
        ),
        (
            "openppo/one.py::work 0 because",
            "is no entry; write: file::function, a number, a reason.",
        ),
        ("a.py::f 1 because\na.py::f 2 because", "stands there twice; keep one line with the sum."),
    ],
)
def test_entry_without_number_or_reason_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        form_list.read(f"[pack]\n{line}\n")


def test_unlisted_form_is_named_with_its_line_and_remedy():
    text = (
        "openppo/one.py:7 in work: x, y, z = a, b, c is a tuple assigned to three and more names;"
        " write a statement for each (3 in this place, 2 listed)."
    )
    assert form_list.problems([place()] * 3, LISTED) == [text] * 3


def test_list_that_allows_more_than_there_is_must_be_lowered():
    assert form_list.problems([place()] * 2, LISTED) == []
    assert form_list.problems([place()], LISTED) == [
        "openppo/one.py::work has 1 of [pack] and form_exceptions.txt lists 2: lower it,"
        " python -m tests.rules.form_list --shrink."
    ]


def test_shrinking_keeps_what_is_left_with_its_reason():
    assert form_list.shrunk([place()], LISTED) == {
        Key("pack", "openppo/one.py::work"): Entry(1, "before the rules")
    }
    assert form_list.shrunk([], LISTED) == {}


def test_shrinking_follows_a_form_to_another_function():
    moved = form_list.shrunk([place(), place(function="other")], LISTED)
    assert moved == {
        Key("pack", "openppo/one.py::work"): Entry(1, "before the rules"),
        Key("pack", "openppo/one.py::other"): Entry(1, "before the rules"),
    }


def test_shrinking_refuses_a_form_that_has_grown():
    with pytest.raises(
        ValueError,
        match="openppo/one.py::work has 3 of .pack., more than form_exceptions.txt allows",
    ):
        form_list.shrunk([place()] * 3, LISTED)
    with pytest.raises(ValueError, match="openppo/one.py::work has 1 of .star., more than"):
        form_list.shrunk([place(form="star")], LISTED)


def run_command(monkeypatch, folder, several, *arguments):
    listed = folder / "form_exceptions.txt"
    listed.write_text(form_list.write(LISTED), encoding="utf-8")
    monkeypatch.setattr(form_list, "LIST", listed)
    monkeypatch.setattr(form_list, "package_places", lambda: several)
    monkeypatch.setattr("sys.argv", ["form_list", *arguments])
    form_list.main()
    return form_list.read(listed.read_text("utf-8"))


def test_command_prints_each_place_and_the_sums(monkeypatch, tmp_path, capsys):
    assert (
        run_command(monkeypatch, tmp_path, [place(), place(form="star")], "--form", "pack")
        == LISTED
    )
    assert capsys.readouterr().out.splitlines() == [
        "[pack] openppo/one.py:7 in work: x, y, z = a, b, c",
        "star 1, pack 1, nested 0, factor 0, guarded 0, chained 0, vague 0, unnamed 0, outside 0",
    ]


def test_command_writes_a_shorter_list_and_refuses_a_longer_one(monkeypatch, tmp_path):
    assert run_command(monkeypatch, tmp_path, [], "--shrink") == {}
    with pytest.raises(SystemExit, match="error: openppo/one.py::work has 1 of .star., more than"):
        run_command(monkeypatch, tmp_path, [place(form="star")], "--shrink")


def test_package_has_only_the_packed_forms_that_are_listed():
    assert (
        form_list.problems(form_list.package_places(), form_list.read(LIST.read_text("utf-8")))
        == []
    )


def test_list_of_exceptions_stays_short():
    entries = form_list.read(LIST.read_text("utf-8"))
    outside = [entry.n for key, entry in entries.items() if key.form == "outside"]
    assert sum(outside) <= MOST_OUTSIDE
    assert sum(entry.n for entry in entries.values()) - sum(outside) <= MOST_PACKED


def test_list_of_exceptions_is_in_order():
    text = LIST.read_text("utf-8")
    assert form_list.write(form_list.read(text)) == text
