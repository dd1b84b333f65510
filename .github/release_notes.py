"""Compare a release's tag with the version and the changelog, and print its notes: ``release_notes.py v1.2.3``.

Run in a checkout of the tag. Links of the notes lead to the files of that tag.
"""

import re
import sys
from pathlib import Path

REPOSITORY = "https://github.com/openppo/openppo"


def main(tag: str) -> None:
    """Print the notes; exit with a message if the checkout is not the release that ``tag`` names."""
    package = Path("openppo/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', package, flags=re.MULTILINE)
    if tag != f"v{version}":
        sys.exit(f"error: the tag is {tag}, and __version__ {version}: one of them is wrong.")

    changelog = Path("CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", changelog, flags=re.MULTILINE))
    dated = rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)"
    headings = [heading for heading in sections if re.fullmatch(dated, heading)]
    if not headings:
        sys.exit(f'error: CHANGELOG.md has no section "## {version} (YYYY-MM-DD)": date it.')

    notes = sections[headings[0]].strip()
    if not notes:
        sys.exit(f'error: the section "## {headings[0]}" of CHANGELOG.md is empty.')
    print(re.sub(r"\]\((?!\w+:|#)", f"]({REPOSITORY}/blob/{tag}/", notes))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python .github/release_notes.py TAG")
    main(sys.argv[1])
