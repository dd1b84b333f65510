"""One HTML file about one or several runs: no network, no server, nothing to build."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from openppo import __version__
from openppo.tracking.report.payload import as_json, payload
from openppo.tracking.report.run_data import RunData, read_run

_PARTS = Path(__file__).with_name("page")
_SCRIPTS = ("dom.js", "charts.js", "tokens.js", "samples.js", "main.js")


def write_report(folders: Sequence[str | Path], output: Path, running: bool = False) -> Path:
    """Write the page about the runs in ``folders`` to ``output``, whole or not at all.

    ``running``: the run is not over and the page will be written again. Raises ``ValueError`` naming a folder without a
    run, ``OSError`` if ``output`` cannot be written.
    """
    page = render([read_run(folder) for folder in folders], running)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.new")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(output)
    return output


def render(runs: Sequence[RunData], running: bool = False) -> str:
    """The page. Sampled text enters it as JSON only, and its scripts insert it as text.

    The policy in its head allows exactly our script and style, so nothing else runs even if some text got through.
    """
    about = {"version": __version__, "written": int(time.time()), "running": running}
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    style = (_PARTS / "style.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    page = (_PARTS / "page.html").read_text(encoding="utf-8")
    for place, text in (
        ("POLICY", policy),
        ("STYLE", style),
        ("SCRIPT", script),
        ("DATA", as_json(about | payload(runs))),  # last: nothing is replaced inside it
    ):
        page = page.replace(f"<!--{place}-->", text, 1)
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
