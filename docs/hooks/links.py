"""MkDocs hook: links out of docs/ become links to the repository, and must lead to a file that is there."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from openppo import __version__

logger = logging.getLogger("mkdocs.hooks.links")
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


@functools.cache
def documented(root: Path) -> str:
    """The tag of a release where ``root`` is a checkout of it, else the main branch."""
    tag = f"v{__version__}"
    try:
        tags = subprocess.run(
            ["git", "tag", "--points-at", "HEAD"], cwd=root, capture_output=True, text=True
        )
    except FileNotFoundError:  # no git
        return "main"
    return tag if tag in tags.stdout.split() else "main"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """``](../x.md)`` that leaves docs/ -> the file in the repository, at the version that is documented."""
    docs = Path(config.docs_dir).resolve()
    root, folder = docs.parent, (docs / page.file.src_uri).parent
    place = f"{config.extra['repository']}/blob/{documented(root)}"

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            logger.warning("%s: the link %s leads to nothing", page.file.src_uri, match[1])
        return f"]({place}/{target.relative_to(root)}{match[2] or ''})"

    return _OUTSIDE.sub(replaced, markdown)
