"""A tag becomes a release: the steps of the workflow run here as GitHub would run them, all but the uploads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openppo import __version__
from tests.packaging.conftest import REPO, SHIPPED

GITHUB = REPO / ".github"
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in GITHUB.glob("workflows/*.yml")}
RELEASE = WORKFLOWS["release"]
FORMS = sorted(file for file in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if file.stem != "config")
SCHEMAS = {
    "github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [REPO / "CITATION.cff"],
}
"""Files that other programs read, by the schema of theirs that check-jsonschema brings."""


def shell_of(name: str) -> str:
    """The shell lines of a step of the release's first job."""
    (step,) = (step for step in RELEASE["jobs"]["build"]["steps"] if step.get("name") == name)
    return step["run"]


def play(name: str, folder: Path, tag: str = f"v{__version__}") -> "subprocess.CompletedProcess":
    """Run a step in ``folder`` as GitHub would: by bash, which ends at the first error."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", shell_of(name)]
    return subprocess.run(
        words, cwd=folder, env=kept | {"GITHUB_REF_NAME": tag}, capture_output=True, text=True
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a release is made of, with a changelog that has the date of this version."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*SHIPPED, "requirements.txt", "requirements-dev.txt", ".github"):
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        options = {"ignore": ignored} if (REPO / name).is_dir() else {}
        copy(REPO / name, tmp_path / name, **options)
    changelog = re.sub(
        rf"^## {re.escape(__version__)} .*",
        f"## {__version__} (2026-12-01)",
        (REPO / "CHANGELOG.md").read_text(),
        flags=re.MULTILINE,
    )
    (tmp_path / "CHANGELOG.md").write_text(f"{changelog}\n## 0.0.1 (2026-01-01)\n\n- The first.\n")
    return tmp_path


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_other_programs_follow_their_schemas(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    checked = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_action_names_its_version_and_every_job_a_limit() -> None:
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    actions = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert len(actions) > 5
    assert [name for name in actions if not re.fullmatch(r"[\w-]+/[\w-]+@v\d[\d.]*", name)] == []
    assert all(job["timeout-minutes"] <= 180 for job in jobs)


def test_only_the_two_uploads_may_write_and_each_one_thing() -> None:
    assert WORKFLOWS["tests"]["permissions"] == {"contents": "read"}
    assert RELEASE["permissions"] == {}
    assert {name: job["permissions"] for name, job in RELEASE["jobs"].items()} == {
        "build": {"contents": "read"},
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    assert [job.get("needs") for job in RELEASE["jobs"].values()] == [None, "build", "pypi"]


def test_a_release_gets_the_notes_of_its_version_with_links_that_lead_out(checkout: Path) -> None:
    done = play("Compare tag, version and changelog", checkout)
    assert done.returncode == 0, done.stderr
    notes = (checkout / "notes.md").read_text()
    assert notes.startswith("### ") and "The first." not in notes
    links: list[str] = re.findall(r"\]\(([^)]+)\)", notes)
    assert f"https://github.com/openppo/openppo/blob/v{__version__}/docs/asynchronous.md" in links
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v9.9.9", "", f"the tag is v9.9.9, and __version__ {__version__}"),
        (f"v{__version__}", "(unreleased)", f'no section "## {__version__} (YYYY-MM-DD)"'),
    ],
)
def test_a_wrong_tag_or_a_changelog_without_a_date_stops_a_release(
    checkout: Path, tag: str, heading: str, message: str
) -> None:
    changelog = checkout / "CHANGELOG.md"
    if heading:
        changelog.write_text(changelog.read_text().replace("(2026-12-01)", heading))
    done = play("Compare tag, version and changelog", checkout, tag)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_release_builds_both_packages_which_an_index_would_take(checkout: Path) -> None:
    done = play("Build", checkout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(file.name for file in (checkout / "dist").iterdir()) == [
        f"openppo-{__version__}-py3-none-any.whl",
        f"openppo-{__version__}.tar.gz",
    ]
    assert done.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_release_installs_its_wheel_in_a_fresh_environment(checkout: Path) -> None:
    """Everything comes from the index, in the pinned versions."""
    for step in ("Build", "Install the wheel in a fresh environment"):
        done = play(step, checkout)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(rf"^openppo +{re.escape(__version__)}$", done.stdout, flags=re.MULTILINE)
    assert "--advantage_estimator" in done.stdout


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert (citation["license"], citation["title"].split(":")[0]) == ("Apache-2.0", "OpenPPO")


def test_forms_name_commands_and_files_that_exist() -> None:
    text = "".join(file.read_text() for file in GITHUB.rglob("*.yml"))
    pages = re.findall(r"github\.com/openppo/openppo/blob/main/([\w./-]+)", text)
    assert pages
    assert [page for page in pages if not (REPO / page).exists()] == []
    programs = re.findall(r"`openppo (\w+)`", text)
    assert [name for name in programs if not (REPO / f"openppo/cli/{name}.py").exists()] == []
