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
    """Tags with attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.ended = True
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append("")
        self.ended = False

    def handle_endtag(self, tag: str) -> None:
        self.ended = True

    def handle_data(self, data: str) -> None:
        if not self.ended:
            self.texts[-1] += data

    def text_of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of each element ``tag``."""
        pairs = zip(self.tags, self.texts, strict=True)
        return [(attributes, text) for (name, attributes), text in pairs if name == tag]


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
    (data,) = [text for attributes, text in Elements(page).text_of("script") if attributes.get("id") == "data"]
    return json.loads(data)


def test_sampled_text_stays_text(make_run: MakeRun) -> None:
    clean, dirty = render([read_run(make_run("clean"))]), render([read_run(hostile_run(make_run))])
    tags = [[tag for tag, _ in Elements(page).tags] for page in (clean, dirty)]
    assert tags[0] == tags[1], "the same elements, whatever the data"
    (run,) = data_of(dirty)["runs"]
    (sample,) = run["samples"]
    assert sample["response"] == sample["tokens"]["texts"][0] == HOSTILE
    assert "alert(1)" not in dirty.replace(re.search(r'id="data">(.*?)</script>', dirty, re.S)[1], "")  # type: ignore[index]


def test_the_policy_of_the_page_allows_its_own_script_and_style_and_nothing_else(make_run: MakeRun) -> None:
    page = Elements(render([read_run(make_run("run"))]))
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in (policy or "").split(";"))
    ((_, style),) = page.text_of("style")
    (script,) = [text for attributes, text in page.text_of("script") if "id" not in attributes]

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == digest(script)
    assert rules["style-src"] == digest(style)


def test_the_page_names_no_other_file_and_no_address(make_run: MakeRun) -> None:
    page = render([read_run(make_run("run"))])
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in Elements(page).tags}
    assert not [a for _, a in Elements(page).tags if "src" in a]
    assert [a["href"] for _, a in Elements(page).tags if "href" in a] == ["#curves"]
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
