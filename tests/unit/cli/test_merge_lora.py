"""Merged weights give plain transformers what peft gives with adapters."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openppo.cli import merge_lora
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.tracking.card_file import write_card

RunCommand = Callable[..., Any]
KINDS: Any = (AutoModelForCausalLM, AutoPeftModelForCausalLM)
IDS = torch.tensor([[5, 9, 12, 17, 30, 8, 1]])


@pytest.fixture(scope="module")
def folders(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEFT folders: ``actor`` with a tokenizer, and ``reward`` with a head."""
    root = tmp_path_factory.mktemp("peft")
    trained: dict[str, Any] = {
        "actor": Actor(str(models / "actor"), lora_rank=2),
        "reward": get_llm_for_sequence_regression(
            str(models / "actor"), "reward", init_value_head=True, lora_rank=2
        ),
    }
    generator = torch.Generator().manual_seed(0)
    for name, module in trained.items():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(generator=generator)
        module.model.save_pretrained(root / name)
    AutoTokenizer.from_pretrained(models / "actor").save_pretrained(root / "actor")
    return root


@pytest.fixture
def merge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_in_process: RunCommand
) -> Callable[..., Path]:
    """Runs the command until it has ended well; the folder that it wrote."""

    def run(*arguments: str, out: str = "out") -> Path:
        monkeypatch.setattr(
            sys, "argv", ["merge_lora.py", "--save_path", str(tmp_path / out), *arguments]
        )
        with pytest.raises(SystemExit) as ended:
            merge_lora.main()
        assert ended.value.code == 0
        return tmp_path / out

    return run


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.parametrize("moved", [False, True])
def test_a_merged_language_model_equals_base_and_adapters_wherever_the_base_is(
    moved, merge, folders, tmp_path, models
):
    lora_path = shutil.copytree(folders / "actor", tmp_path / "lora")
    if moved:
        options = json.loads((lora_path / "adapter_config.json").read_text())
        (lora_path / "adapter_config.json").write_text(
            json.dumps({**options, "base_model_name_or_path": "/gone"})
        )
    given = (
        ["--pretrain", str(shutil.copytree(models / "actor", tmp_path / "moved"))] if moved else []
    )
    out = merge("--lora_path", str(lora_path), *given)
    found, peft = (
        kind.from_pretrained(f) for kind, f in zip(KINDS, (out, folders / "actor"), strict=True)
    )
    torch.testing.assert_close(logits(found), logits(peft), rtol=0, atol=1e-5)
    assert not any("lora" in name for name in found.state_dict())
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (out, folders / "actor")
    )
    assert ours == theirs
    assert not list(out.glob("adapter_*"))
    rounded = AutoModelForCausalLM.from_pretrained(
        merge("--lora_path", str(lora_path), *given, "--bf16", out="bf16")
    )
    for name, weight in rounded.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, found.state_dict()[name].bfloat16()), "the sum is rounded once"


def test_merged_files_are_as_open_as_the_umask_says(merge, folders):
    before = os.umask(0o027)
    try:
        out = merge("--lora_path", str(folders / "actor"))
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in out.iterdir()} == dict.fromkeys(
        (
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        "0o640",
    )


def test_a_merged_reward_model_has_its_head_and_its_own_config(merge, folders, tmp_path, models):
    lora_path = shutil.copytree(folders / "reward", tmp_path / "reward")
    config = json.loads((models / "actor" / "config.json").read_text())
    (lora_path / "model_config.json").write_text(
        json.dumps({**config, "mean": 0.25, "pad_token_id": 2})
    )
    out = merge("--lora_path", str(lora_path))
    found = AutoModelForSequenceClassification.from_pretrained(out)
    expected = AutoPeftModelForSequenceClassification.from_pretrained(lora_path, num_labels=1)
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=1e-5)
    assert (found.config.num_labels, found.config.mean, found.config.pad_token_id) == (1, 0.25, 2)


def test_what_cannot_be_merged_is_said_in_one_line(run_in_process, folders, models, tmp_path):
    gone = shutil.copytree(folders / "actor", tmp_path / "gone")
    options = json.loads((gone / "adapter_config.json").read_text())
    (gone / "adapter_config.json").write_text(
        json.dumps({**options, "base_model_name_or_path": "/gone"})
    )
    empty = shutil.copytree(folders / "actor", tmp_path / "empty")
    (empty / "adapter_model.safetensors").unlink()
    (tmp_path / "file").write_text("")
    for arguments, says in (
        (("--lora_path", models / "actor"), "--lora_path .*actor: this is not a PEFT folder"),
        (("--lora_path", gone), "--lora_path .*gone: its base model /gone: no such local folder"),
        (("--lora_path", empty), "--lora_path .*empty: its adapters cannot be merged into"),
        (
            ("--lora_path", folders / "actor", "--pretrain", "/gone"),
            "--pretrain /gone: no such local folder",
        ),
        (
            ("--lora_path", folders / "actor", "--save_path", models / "actor"),
            "--save_path .*is the base model",
        ),
        (
            ("--lora_path", folders / "actor", "--save_path", folders / "reward"),
            "--save_path .*holds a model already",
        ),
        (
            ("--lora_path", folders / "actor", "--save_path", models / "chat"),
            "--save_path .*holds a model already",
        ),
        (
            ("--lora_path", folders / "actor", "--save_path", tmp_path / "file" / "x"),
            "--save_path .*cannot be written",
        ),
    ):
        given = (
            arguments
            if "--save_path" in arguments
            else (*arguments, "--save_path", tmp_path / "out")
        )
        ended = run_in_process("merge_lora", *map(str, given))
        (line,) = re.findall("^error.*$", ended.stderr, re.MULTILINE)
        assert (ended.code, re.search(says, line) is not None) == (2, True), line


def test_the_card_repeats_how_the_adapters_were_trained(folders, merge, models, tmp_path):
    adapters = tmp_path / "mine"
    shutil.copytree(folders / "actor", adapters)
    header = {"library_name": "peft", "license": "mit", "tags": ["openppo", "sft"]}
    write_card(adapters, header, "# A\n\n## Training\n\nWith care.\n")
    card = (merge("--lora_path", str(adapters)) / "README.md").read_text()
    for part in (
        "---\nlibrary_name: transformers\nlicense: mit\npipeline_tag: text-generation\ntags:\n- openppo\n- sft\n---",
        "# actor with adapters mine",
        "## Training\n\nWith care.\n",
    ):
        assert part in card
    assert str(models) not in card
