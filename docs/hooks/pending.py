"""MkDocs hook: pages that others are still writing are left out of the navigation while they are not there."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

PENDING = {"watching.md", "report.md", "metrics.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Drop their entries."""
    missing = [page for page in PENDING if not (Path(config.docs_dir) / page).exists()]
    for section in config.nav or []:
        for pages in section.values():
            if isinstance(pages, list):
                pages[:] = [
                    entry for entry in pages if isinstance(entry, str) or next(iter(entry.values())) not in missing
                ]
    return config
