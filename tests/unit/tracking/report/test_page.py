"""The page is one file that asks nobody for anything, whatever was sampled."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from openppo.tracking.report.page import render, write_report
from openppo.tracking.report.run_data import read_run

MakeRun = Callable[..., Path]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- <!--DATA--> ]]> \x00\x1b[31m\u202e \ud83d"


class Elements(HTMLParser):
    """Tags of a page with their attributes, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def between(start: str, end: str, page: str) -> str:
    return page.split(start, 1)[1].split(end, 1)[0]


def hostile_run(make_run: MakeRun) -> Path:
    text = {"prompt": HOSTILE, "response": HOSTILE, "label": HOSTILE, "finish_reason": "eos", "rewards": {HOSTILE: 1.0}}
    tokens = {"first": 1, "n_tokens": 1, "texts": [HOSTILE], "ids": [1], "trained": [1], "value": [1.0]}
    return make_run(
        "hostile",
        [{"step": 1, "time": 0.0, "reward": 1.0, HOSTILE: 2.0}],
        [{"step": 1, "time": 0.0, "sample": 0, "reward": 1.0, **text}],
        [{"step": 1, "time": 0.0, "sample": 0, **tokens}],
        {"prompt_data": HOSTILE.replace("\x00", "").replace("\x1b", "").replace("\ud83d", "")},
    )


def data_of(page: str) -> dict[str, Any]:
    return json.loads(between('id="data">', "</script>", page))


def test_sampled_text_stays_text(make_run: MakeRun) -> None:
    clean, dirty = render([read_run(make_run("clean"))]), render([read_run(hostile_run(make_run))])
    tags = [[tag for tag, _ in Elements(page).found] for page in (clean, dirty)]
    assert tags[0] == tags[1], "the same elements, whatever the data"
    (run,) = data_of(dirty)["runs"]
    (sample,) = run["samples"]
    assert sample["response"] == sample["tokens"]["texts"][0] == HOSTILE
    assert "alert(1)" not in dirty.replace(between('id="data">', "</script>", dirty), "")


def test_the_policy_of_the_page_allows_its_own_script_and_style_and_nothing_else(make_run: MakeRun) -> None:
    page = render([read_run(make_run("run"))])
    (policy,) = [a["content"] for _, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in (policy or "").split(";"))

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == digest(between("<script>", "</script>", page))
    assert rules["style-src"] == digest(between("<style>", "</style>", page))


def test_the_page_names_no_other_file_and_no_address(make_run: MakeRun) -> None:
    page = render([read_run(make_run("run"))])
    elements = Elements(page).found
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in elements}
    assert not [a for _, a in elements if "src" in a]
    assert [a["href"] for _, a in elements if "href" in a] == ["#curves"]
    addresses = set(re.findall(r"https?://[^\s\"')]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a language, which nobody fetches"
    for call in ("fetch(", "XMLHttpRequest", "import(", "innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert call not in page


def test_a_page_is_replaced_as_a_whole(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, output = make_run("run"), tmp_path / "new" / "page.html"
    write_report([run], output)
    before = output.read_text()
    monkeypatch.setattr(Path, "write_text", lambda self, text, **options: self.open("w").write(text[:100]) / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([run], output)
    assert output.read_text() == before


def test_a_page_without_samples_options_and_environment_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert data_of(render([read_run(tmp_path)]))["runs"][0]["last_step"] == 0
