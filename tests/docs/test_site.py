"""The pages build without a warning, and say what the code says; tests/browser opens each."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from openppo import __version__
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from tests.docs.conftest import REPO, Run

TROUBLE = (REPO / "docs" / "troubleshooting.md").read_text()
COMMANDS = sorted(
    file.stem for file in (REPO / "openppo/cli").glob("*.py") if "__main__" in file.read_text()
)
VARIABLE = "…"
"""What stands for names and numbers in quoted messages."""


@pytest.mark.parametrize(
    ("tag", "expected"), [(f"v{__version__}", f"v{__version__}"), ("v0.0.1", "main")]
)
def test_a_link_to_the_repository_leads_to_the_version_that_is_documented(
    tmp_path: Path, tag: str, expected: str
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "CHANGELOG.md").write_text("")
    for command in ("init --quiet", "add .", "commit --quiet -m docs", f"tag {tag}"):
        git = f"git -c user.name=a -c user.email=a@b {command}"
        subprocess.run(git.split(), cwd=tmp_path, check=True)
    hook = runpy.run_path(str(REPO / "docs/hooks/links.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="versions.md"))
    config = SimpleNamespace(
        docs_dir=str(tmp_path / "docs"), extra={"repository": "https://host/us"}
    )
    shown = hook("[what changed](../CHANGELOG.md#top) [here](data.md)", page, config, None)
    assert (
        shown == f"[what changed](https://host/us/blob/{expected}/CHANGELOG.md#top) [here](data.md)"
    )


def test_contributing_says_how_the_pages_are_built() -> None:
    text = " ".join((REPO / "CONTRIBUTING.md").read_text().split())
    (needs,) = re.findall(
        r"`pip install -e \. \"\$\(grep ([\w-]+) requirements-dev\.txt\)\"`", text
    )
    pins = [
        line for line in (REPO / "requirements-dev.txt").read_text().splitlines() if needs in line
    ]
    assert [pin.split("==")[0] for pin in pins] == ["mkdocs-material"]
    assert "`python -m mkdocs serve`" in text and "`python -m mkdocs build --strict`" in text


def test_each_document_is_a_page(site: Path) -> None:
    documents = {
        file.relative_to(REPO / "docs").with_suffix("") for file in (REPO / "docs").rglob("*.md")
    }
    pages = {file.relative_to(site).with_suffix("") for file in site.rglob("*.html")}
    assert pages - documents == {Path("404"), *(Path("flags") / command for command in COMMANDS)}
    assert documents <= pages


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_each_flag_of_its_help(
    run: Run, site: Path, command: str
) -> None:
    shown = run([sys.executable, "-m", "openppo", command, "--help", "all"], site, COLUMNS="200")
    flags = set(re.findall(r"^  (?:--)?(\w+)", shown, flags=re.MULTILINE))
    page = (site / "flags" / f"{command}.html").read_text()
    assert bool(flags) == (command != "check"), "which has no options"
    assert {flag for flag in flags if f'id="{flag.lower()}"' not in page} == set()


def test_a_row_has_form_default_and_docstring_of_its_field(site: Path) -> None:
    def row(flag: str) -> list[str]:
        (found,) = re.findall(rf'<tr>\s*<td><a id="{flag}".*?</tr>', page, flags=re.DOTALL)
        cells = re.findall(r"<td>(.*?)</td>", found, re.DOTALL)
        return [" ".join(re.sub(r"<[^>]+>", "", cell).split()) for cell in cells]

    page = (site / "flags" / "train_ppo.html").read_text()
    assert row("gamma") == ["--gamma X", "1.0", "Discount per action token."]
    assert row("kl_estimator")[:2] == ["--kl_estimator {k1,k2,k3}", "k1"]
    assert row("reward_clip_range")[:2] == ["--reward_clip_range X X", "-10.0 10.0"]
    assert row("use_kl_loss")[:2] == ["--use_kl_loss", "off"]
    assert row("pretrain")[:2] == ["--pretrain TEXT", "required"]


def test_an_option_in_a_text_leads_to_its_row(site: Path) -> None:
    page = (site / "troubleshooting.html").read_text()
    links = re.findall(r'<a class="option" href="([^"#]+)#(\w+)"><code>--(\w+)', page)
    assert len(links) > 30
    assert [link for link in links if f'id="{link[1]}"' not in (site / link[0]).read_text()] == []


def templates() -> Iterator[str]:
    """Texts in the package, with ``VARIABLE`` where an f-string puts in a value."""
    for file in (REPO / "openppo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(v.value) if isinstance(v, ast.Constant) else VARIABLE for v in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Each stands in one text of the code, or is what an unknown flag really gives, which is put together of two."""
    messages = re.findall(
        r"^```text\n(.*?)\n```", TROUBLE.split("## Messages")[1], flags=re.DOTALL | re.MULTILINE
    )
    assert len(messages) > 25
    pattern = {message: ".*".join(map(re.escape, message.split(VARIABLE))) for message in messages}
    known = list(templates())
    for flag in ("--eps_clipp", "--epsilon"):
        with pytest.raises(ValueError) as unknown:
            parse_options(TrainPPOConfig, [flag, "0.1"])
        known.append(str(unknown.value))
    assert [
        message for message, text in pattern.items() if not any(re.search(text, t) for t in known)
    ] == []


def test_examples_lists_every_script() -> None:
    page = (REPO / "docs" / "examples.md").read_text()
    helpers = {"setup.sh", "quickstart_report.py", "sort_letters.py", "stories.py"}
    helpers |= {"agent_model.py", "agent_report.py", "distill_report.py"}
    files = {
        file.name for file in (REPO / "examples").rglob("*") if file.suffix in (".sh", ".py")
    } - helpers
    assert [name for name in files if f"{name}`]" not in page] == []
