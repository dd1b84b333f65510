"""A model card replaces an earlier one of ours, and never what a person wrote."""

from pathlib import Path

import yaml

from openppo.tracking.card_file import card_header, write_card

HEADER = {"library_name": "transformers", "tags": ["openppo", "ppo"]}


def written(folder: Path, text: str) -> str:
    write_card(folder, HEADER, text)
    return (folder / "README.md").read_text()


def test_a_card_has_the_form_of_the_hub(tmp_path):
    text = written(tmp_path, "# A model\n")
    empty, header, body = text.split("---\n")
    assert (empty, yaml.safe_load(header)) == ("", HEADER)
    assert body.startswith("<!-- ") and body.endswith("-->\n# A model\n")
    assert card_header(tmp_path) == HEADER


def test_our_card_is_replaced(tmp_path):
    assert "# One" in written(tmp_path, "# One\n")
    assert "# One" not in written(tmp_path, "# Two\n")


def test_a_card_that_a_person_wrote_or_edited_stays(tmp_path, caplog):
    file = tmp_path / "README.md"
    ours = written(tmp_path, "# One\n")
    for text in ("# By hand\n", ours.replace("One", "One, and more"), "license: mit\n" + ours, ""):
        file.write_text(text)
        with caplog.at_level("INFO", "openppo"):
            assert written(tmp_path, "# Two\n") == text
        assert "stays as it is" in caplog.text
        caplog.clear()


def test_the_empty_card_of_peft_is_replaced(tmp_path):
    stub = "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n\n[More Information Needed]\n"
    (tmp_path / "README.md").write_text(stub)
    assert "# Ours" in written(tmp_path, "# Ours\n")


def test_a_header_that_cannot_be_read_counts_as_none(tmp_path):
    for text in ("# None\n", "---\n: [\n---\n", "---\n- list\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert card_header(tmp_path) == {}
