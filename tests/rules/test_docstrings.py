"""First lines of docstrings are short and begin with the verb or noun; examples written by hand show faults."""

from textwrap import dedent

import pytest

from tests.rules import docstrings
from tests.rules.docstrings import FIRST_WORDS, MOST_WORDS, fault, faults, package_faults

LONG = "Return " + "word " * MOST_WORDS


def lines(source):
    """Lines of the faulty docstrings of a source."""
    return [int(place.split(":")[1]) for place in faults(dedent(source), "one.py")]


@pytest.mark.parametrize("word", FIRST_WORDS)
def test_first_word_is_none_that_announces_a_clause(word):
    assert fault(f"{word} a batch holds.").startswith(f"begins with {word};")
    assert fault(f"{word}: a batch.").startswith(f"begins with {word};")
    assert fault(f"Return {word.lower()} a batch holds.") == ""


@pytest.mark.parametrize(
    "text", ["Offset of a batch.", "Whatever is left.", "``What`` is kept.", ""]
)
def test_other_words_may_begin_alike(text):
    assert fault(text) == ""


def test_first_line_has_no_more_than_twenty_words():
    assert fault(" ".join(["word"] * 20)) == ""
    assert fault(" ".join(["word"] * 21)).startswith("21 words in the first line, more than 20;")


def test_lines_after_the_first_may_be_long_and_begin_as_they_like():
    assert fault(f"Return a batch.\n\nWhat it holds: {LONG}") == ""
    assert fault(f"\n{LONG}") == ""


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a module."""',
        'class Batch:\n    """What is trained on."""',
        'def size():\n    """Whether it is empty."""',
        'async def size():\n    """Where it lies."""',
        'SIZE = 1\n"""That of a batch."""',
        'SIZE: int = 1\n"""Of a batch."""',
        'class Batch:\n    size: int\n    """Of rows."""',
        'class Batch:\n    def __init__(self):\n        self.size = 1\n        """Of rows."""',
        'if True:\n    pass\nelse:\n    SIZE = 1\n    """Of a batch."""',
        'try:\n    pass\nfinally:\n    SIZE = 1\n    """Of a batch."""',
        f'"""{LONG}\n\nMore.\n"""',
        '"""\nOf a module.\n"""',
    ],
)
def test_docstrings_are_found_wherever_they_stand(source):
    assert len(lines(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "# Of a comment.\nSIZE = 1",
        'SIZE = """Of a value."""',
        'print("x")\n"""Of nothing."""',
        'def size():\n    pass\n    """Of nothing."""',
    ],
)
def test_other_texts_are_no_docstrings(source):
    assert lines(source) == []


def test_each_place_is_named_with_its_line_in_order():
    source = '"""Load."""\n\nSIZE = 1\n"""Of rows."""\n\ndef size():\n    """Whether it is so."""\n'
    first, second = faults(source, "openppo/one.py")
    assert first.startswith("openppo/one.py:4: begins with Of;")
    assert second.startswith("openppo/one.py:7: begins with Whether;")


def test_command_prints_the_places_of_a_folder(monkeypatch, capsys):
    places = ["openppo/cli/one.py:1: begins with Of", "openppo/two.py:1: begins with Of"]
    monkeypatch.setattr(docstrings, "package_faults", lambda: places)
    monkeypatch.setattr("sys.argv", ["docstrings", "openppo/cli"])
    docstrings.main()
    assert capsys.readouterr().out.splitlines() == [places[0], "1 docstrings"]


def test_docstrings_of_the_package_begin_with_a_verb_or_a_noun():
    assert package_faults() == []
