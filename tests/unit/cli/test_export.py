"""What openppo export takes for a checkpoint, and how it refuses the rest."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from openppo.jobs.export import find_checkpoint
from openppo.trainer.checkpointer import stopped


def write_checkpoint(folder: Path, **state: Any) -> Path:
    """A folder with a manifest that fits its only file."""
    folder.mkdir(parents=True)
    content = json.dumps(state).encode()
    (folder / "state.json").write_bytes(content)
    described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps({"format": 6, "step": 1, "files": {"state.json": described}})
    )
    return folder


def test_the_newest_of_a_folder_of_checkpoints_is_taken(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints_ppo"
    for step in (9, 10, 100_000_000):
        write_checkpoint(checkpoints / f"step_{step:08d}")
    (checkpoints / "latest").symlink_to("step_00000009")
    (checkpoints / ".step_100000001.partial").mkdir()
    expected = {"": "step_100000000", "step_00000010": "step_00000010", "latest": "step_00000009"}
    assert {name: find_checkpoint(checkpoints / name).name for name in expected} == expected
    with pytest.raises(
        ValueError, match=f"there is no checkpoint of a training command; give {checkpoints}"
    ):
        find_checkpoint(tmp_path / "run")
    (checkpoints / "step_00000010" / "state.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"step_00000010 is damaged \(state.json .*\): give another"
    ):
        find_checkpoint(checkpoints / "step_00000010")
    said = stopped("SIGTERM", 3, 9, Path("my runs/step_00000003"))
    assert said.endswith("; 'openppo export 'my runs/step_00000003' FOLDER' makes a model of it")


def test_what_cannot_be_exported_is_one_line(run_in_process, models, tmp_path):
    options = {"pretrain": "gone/model", "dataset": "d.jsonl", "lora_rank": 0, "save_path": "run"}
    started = {"contents": {"--pretrain": "0" * 64}, "step": 1}
    sft = write_checkpoint(
        tmp_path / "sft" / "step_00000001", kind="sft", options=options, **started
    )
    reinforce = {"pretrain": str(models / "actor"), "prompt_data": "d", "reward_fn": "r.py"}
    reinforce["advantage_estimator"] = "reinforce"
    ppo = write_checkpoint(
        tmp_path / "ppo" / "step_00000001", kind="ppo", options=reinforce, **started
    )
    moved = {**reinforce, "apply_chat_template": True, "chat_template": "gone.jinja"}
    templated = write_checkpoint(
        tmp_path / "t" / "step_00000001", kind="ppo", options=moved, contents={}, step=1
    )
    for arguments, says in (
        ((templated, "out_t"), "--chat_template gone.jinja: cannot be read"),
        ((tmp_path / "none", "out"), "CHECKPOINT .*none: there is no checkpoint"),
        ((models / "actor", "out"), "CHECKPOINT .*actor: there is no checkpoint"),
        ((sft, sft), "FOLDER .* is CHECKPOINT"),
        ((sft, ""), "FOLDER is empty"),
        (
            (sft, "out"),
            "--pretrain gone/model: .* The run started from it: say where it is now with --pretrain",
        ),
        (
            (sft, "out", "--pretrain", models / "actor"),
            "--pretrain .*actor is not what the run started from",
        ),
        ((sft, "out", "--role", "critic"), "--role critic: the run of .* had none"),
        (
            (sft, "out", "--critic_pretrain", "x"),
            "--critic_pretrain has an effect with --role critic only: add --role",
        ),
        ((ppo, "out", "--role", "critic"), "--role critic: the run of .* had none"),
        ((ppo, models / "actor"), "FOLDER .*actor is --pretrain"),
        ((ppo, "out"), "--pretrain .*actor is not what the run started from"),
    ):
        ended = run_in_process("export", *map(str, arguments))
        (line,) = re.findall("^error.*$", ended.stderr, re.MULTILINE)
        assert (ended.code, re.search(says, line) is not None) == (2, True), line
