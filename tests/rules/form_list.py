"""The list of packed forms that may stay, ``form_exceptions.txt``: each place with its number of forms and a reason.

python -m tests.rules.form_list            print every place in openppo/ with its line
python -m tests.rules.form_list --shrink   write the list anew with what is left; refuses if a form has grown
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.rules.forms import FORMS, Place, places

REPO = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("form_exceptions.txt")
SHRINK = "python -m tests.rules.form_list --shrink"
HEAD = f"""# Packed forms that may stay (tests/rules/forms.py). The list only shrinks; after mending a place:
#     {SHRINK}
# An entry: file::function, how many of the form are in it, and why they stay.
"""


class Key(NamedTuple):
    """A form in a function of a file."""

    form: str
    place: str


class Entry(NamedTuple):
    """How many of a form a place may have, and why."""

    n: int
    reason: str


Entries = Mapping[Key, Entry]


def package_places() -> list[Place]:
    """All packed forms in the files of ``openppo/``."""
    files = sorted((REPO / "openppo").rglob("*.py"))
    return places({file.relative_to(REPO).as_posix(): file.read_text("utf-8") for file in files})


def key(place: Place) -> Key:
    """The entry that a place belongs to."""
    return Key(place.form, f"{place.file}::{place.function}" if place.function else place.file)


def read(text: str) -> dict[Key, Entry]:
    """The entries of a list. Raises ``ValueError`` for a line without form, number or reason, and for one twice."""
    entries: dict[Key, Entry] = {}
    form = ""
    for line in text.splitlines():
        if line.startswith("["):
            form = line.strip("[]")
        elif line and not line.startswith("#"):
            place, count, reason = (*line.split(" ", 2), "", "")[:3]
            if form not in FORMS or not count.isdigit() or int(count) == 0 or not reason.strip():
                raise ValueError(
                    f"{line!r} under [{form}] is no entry; write: file::function, a number, a reason."
                )
            if Key(form, place) in entries:
                raise ValueError(
                    f"{line!r} under [{form}] stands there twice; keep one line with the sum."
                )
            entries[Key(form, place)] = Entry(int(count), reason)
    return entries


def write(entries: Entries) -> str:
    """The list as text, by form, then by place."""
    by_form: dict[str, list[str]] = {form: [] for form in FORMS}
    for each, entry in sorted(entries.items()):
        by_form[each.form].append(f"{each.place} {entry.n} {entry.reason}\n")
    parts = [
        f"\n[{form}]\n# {FORMS[form]}\n{''.join(lines)}" for form, lines in by_form.items() if lines
    ]
    return "".join([HEAD, *parts])


def problems(several: Iterable[Place], entries: Entries) -> list[str]:
    """What differs from the list: places with more forms than it allows, each with its line, and with fewer."""
    by_key: dict[Key, list[Place]] = defaultdict(list)
    for place in several:
        by_key[key(place)].append(place)
    texts = []
    for each in sorted(by_key.keys() | entries.keys()):
        n, allowed = len(by_key[each]), entries[each].n if each in entries else 0
        if n > allowed:
            texts += [
                f"{place} is {FORMS[each.form]} ({n} in this place, {allowed} listed)."
                for place in by_key[each]
            ]
        if n < allowed:
            texts.append(
                f"{each.place} has {n} of [{each.form}] and {LIST.name} lists {allowed}: lower it, {SHRINK}."
            )
    return texts


def shrunk(several: Iterable[Place], entries: Entries) -> dict[Key, Entry]:
    """The list of what is left. A form that moved to another place takes the reason of one that is gone along.

    Raises ``ValueError`` if a form has grown.
    """
    counts = Counter(map(key, several))
    left = {
        each: Entry(min(counts[each], entry.n), entry.reason) for each, entry in entries.items()
    }
    gone = Counter({each: entry.n - left[each].n for each, entry in entries.items()})
    for each in sorted(counts):
        old = left.get(each, Entry(0, ""))
        for n in range(old.n + 1, counts[each] + 1):
            source = nearest(each, gone)
            if source is None:
                raise ValueError(
                    f"{each.place} has {counts[each]} of [{each.form}], more than {LIST.name} allows: mend it, or write"
                    " a line with a reason by hand."
                )
            gone[source] -= 1
            left[each] = Entry(n, old.reason or entries[source].reason)
    return {each: entry for each, entry in left.items() if entry.n > 0}


def nearest(moved: Key, gone: Counter[Key]) -> Key | None:
    """The place that a form has probably moved from: one where it is gone, in the same file if there is one."""
    sources = [each for each, n in sorted(gone.items()) if n > 0 and each.form == moved.form]
    same_file = [each for each in sources if file_of(each) == file_of(moved)]
    return next(iter([*same_file, *sources]), None)


def file_of(place: Key) -> str:
    """The file of an entry."""
    return place.place.partition("::")[0]


def main() -> None:
    """Print the places, or write the list anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shrink", action="store_true", help="write the list anew; refuses if a form has grown"
    )
    parser.add_argument("--form", choices=FORMS, help="print the places of one form only")
    options = parser.parse_args()
    several = package_places()
    if options.shrink:
        try:
            entries = shrunk(several, read(LIST.read_text("utf-8")))
        except ValueError as error:
            sys.exit(f"error: {error}")
        LIST.write_text(write(entries), encoding="utf-8")
    else:
        for place in several:
            if options.form in (None, place.form):
                print(f"[{place.form}] {place}")
    counts = Counter(place.form for place in several)
    print(", ".join(f"{form} {counts[form]}" for form in FORMS))


if __name__ == "__main__":
    main()
