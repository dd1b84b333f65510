"""``--chat_template`` and ``--chat_template_kwargs`` count in every command that renders chats."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from openppo.models.pretrained import load_tokenizer

TEMPLATE = (
    "{% if enable_thinking is not defined %}{{ raise_exception('shall it think') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}no{% endif %}{% endif %}"
)
OFF = '{"enable_thinking":false}'


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """A model whose template asks for an argument."""
    folder = Path(shutil.copytree(models / "actor", tmp_path / "chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "line", ["ppo", "sft", "rm", "prm --dataset steps.jsonl", "generate", "evaluate"]
)
def test_every_command_passes_the_arguments_to_its_template(
    line, run_line, model, tmp_path, monkeypatch
):
    (tmp_path / "steps.jsonl").write_text(
        '{"prompt": "a", "steps": ["b", "c"], "labels": [true, false]}\n' * 4
    )
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(0)
    )  # rows are read
    line += f" --pretrain {model} --apply_chat_template"
    refused = run_line(line)
    assert (refused.code, refused.stderr.count("shall it think")) == (2, 1)
    ended = run_line(f"{line} --chat_template_kwargs {OFF}")
    assert ended.code == 0, ended.stderr


def test_arguments_hold_for_every_rendering_and_are_not_saved(model, tmp_path):
    tokenizer = load_tokenizer(str(model), "--pretrain", template_kwargs=json.loads(OFF))
    chat = [{"role": "user", "content": "a"}]
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert asked == "<user>a<eos><assistant>no"
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.chat_template == TEMPLATE
    assert saved.apply_chat_template(chat, tokenize=False, enable_thinking=True) == "<user>a<eos>"


@pytest.mark.parametrize("name", ["enable_thinkng", "messages"])
def test_an_argument_without_effect_is_refused(name, model):
    says = f"^--chat_template_kwargs: the chat template of --pretrain .* does not use '{name}'. Correct"
    with pytest.raises(ValueError, match=says):
        load_tokenizer(str(model), "--pretrain", template_kwargs={name: True})


@pytest.mark.parametrize(
    "line", ["ppo", "sft", "rm", "prm --dataset steps.jsonl", "generate", "evaluate"]
)
def test_every_command_takes_its_template_from_a_file(
    line, run_line, models, tmp_path, monkeypatch
):
    (tmp_path / "steps.jsonl").write_text(
        '{"prompt": "a", "steps": ["b", "c"], "labels": [true, false]}\n' * 4
    )
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(0)
    )  # rows are read
    line += f" --pretrain {models}/chat --apply_chat_template --chat_template {tmp_path}/own.jinja"
    for template, code, said in (
        (TEMPLATE, 2, "shall it think"),
        (TEMPLATE.replace("is not defined", "is none"), 0, ""),
        ("\n{{ messages", 2, "own.jinja, line 2: unexpected end of template"),
        ("", 2, "own.jinja: the file is empty"),
    ):
        (tmp_path / "own.jinja").write_text(template)
        ended = run_line(line)
        assert (ended.code, said in ended.stderr) == (code, True), ended.stderr
    (tmp_path / "own.jinja").unlink()
    assert "own.jinja: cannot be read" in run_line(line).stderr


def test_a_template_of_a_file_is_saved_with_the_tokenizer(models, tmp_path):
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    tokenizer = load_tokenizer(
        str(models / "chat"), "--pretrain", chat_template=str(tmp_path / "own.jinja")
    )
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "own a"
