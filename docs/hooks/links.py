"""MkDocs hook: links out of docs/ become links to the repository, and must lead to a file that is there."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks.links")
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """``](../x.md)`` that leaves docs/ -> the file in the repository, at the version that is documented."""
    docs = Path(config.docs_dir).resolve()
    root, folder = docs.parent, (docs / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            logger.warning("%s: the link %s leads to nothing", page.file.src_uri, match[1])
        return f"]({config.extra['repository']}/blob/main/{target.relative_to(root)}{match[2] or ''})"

    return _OUTSIDE.sub(replaced, markdown)
