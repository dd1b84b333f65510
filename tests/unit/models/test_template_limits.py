"""Chat templates without end, or without measure, are refused; all others are none of this check's business."""

import time

import psutil
import pytest

from openppo.models import template_limits
from openppo.models.pretrained import load_tokenizer

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OVER_TURNS = "".join(f"{{% for m{n} in messages %}}" for n in range(6)) + "." + "{% endfor %}" * 6
SLOW = [
    pytest.param(NESTED, id="nested ranges"),
    pytest.param(OVER_TURNS, id="loops over turns"),
    pytest.param("{% if tools %}" + NESTED + "{% endif %}", id="with tools only"),
    pytest.param("{{ 10 ** (10 ** 8) }}", id="a constant, computed where the template is compiled"),
]
LARGE = [
    pytest.param(
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        id="doubled",
    ),
    pytest.param("{{ 'a' * 10 ** 12 }}", id="a constant"),
]
HARMLESS = [
    "{{ raise_exception('no') }}",
    "{% for",
    "{{ messages[99].content.x }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
]


@pytest.fixture
def save(make_tokenizer, tmp_path):
    """``save(template)`` is a folder of a tokenizer with this chat template."""

    def with_template(template):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "chat")
        return str(tmp_path / "chat")

    return with_template


@pytest.mark.parametrize("template", SLOW)
def test_a_template_that_takes_too_long_is_refused(template, save, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 1)
    folder = save(template)
    says = (
        f"^--pretrain {folder}: its chat template takes over 1 s of CPU time for a short"
        + " conversation, and was stopped"
    )
    with pytest.raises(ValueError, match=says):
        load_tokenizer(folder, "--pretrain")


@pytest.mark.parametrize("template", LARGE)
def test_a_template_that_needs_too_much_memory_is_refused(template, save):
    folder = save(template)
    with pytest.raises(
        ValueError, match="its chat template needs over 1 GiB of memory for a short conversation"
    ):
        load_tokenizer(folder, "--reward_pretrain")


def test_a_template_of_a_file_is_named(save, tmp_path, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 1)
    (tmp_path / "own.jinja").write_text(NESTED)
    says = f"^--chat_template {tmp_path}/own.jinja: the template takes over 1 s of CPU time"
    with pytest.raises(ValueError, match=says):
        load_tokenizer(save(None), "--pretrain", chat_template=str(tmp_path / "own.jinja"))


@pytest.mark.parametrize("template", HARMLESS)
def test_other_errors_are_left_to_real_messages(template, save, capfd):
    before = psutil.Process().children()
    assert load_tokenizer(save(template), "--pretrain").chat_template == template
    assert psutil.Process().children() == before
    assert capfd.readouterr() == ("", "")


def test_a_rendering_that_waits_is_ended(save, monkeypatch):
    """As after a fork while another thread held a lock."""
    folder = save("{{ messages }}")
    monkeypatch.setattr(template_limits, "_SECONDS_OF_THE_CLOCK", 1)
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerBase.apply_chat_template", lambda *a, **k: time.sleep(60)
    )
    with pytest.raises(ValueError, match="takes over 1 s for a short"):
        load_tokenizer(folder, "--pretrain")
