"""MkDocs hook: the script that the offline plugin would load from a CDN comes with the pages."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the copy in assets/ instead."""
    return output.replace(_ELSEWHERE, get_relative_url("assets/iframe-worker.js", page.file.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page of addresses that do not exist."""
    return output_content.replace(_ELSEWHERE, "/assets/iframe-worker.js")
