"""What the documents show is what runs: their Python blocks, commands and recipes, in a tiny form."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from openppo.cli.options import parse_options
from openppo.config import ServeRMConfig

REPO = Path(__file__).parents[2]
DOCS = {file.stem: file.read_text() for file in sorted((REPO / "docs").glob("*.md"))}
SMALL = (
    "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --micro_train_batch_size 2 "
    "--generate_max_len 4 --max_samples 8"
)
MODELS = {"MODEL": "policy", "Qwen/Qwen2.5-7B-Instruct": "policy", "REWARD_MODEL": "reward", "PRM": "policy"}
TRAIN = """
import sys

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.trainer import build_ppo_trainer

for line in sys.argv[1:]:
    trainer = build_ppo_trainer(parse_options(TrainPPOConfig, line.split("\\t")))
    trainer.fit()
    assert trainer.global_step >= 2
    print("done", flush=True)
trainer.close()  # once: all share the process group
"""
Run = Callable[..., str]


def blocks(name: str, language: str) -> list[str]:
    """Fenced blocks of a document in one language ('' for plain ones)."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS[name], flags=re.DOTALL | re.MULTILINE)


def commands(name: str, command: str) -> list[list[str]]:
    """The flags of each ``python -m openppo.cli.<command>`` in a document."""
    text = "".join(blocks(name, "bash")).replace("\\\n", " ")
    return [shlex.split(flags) for flags in re.findall(rf"openppo\.cli\.{command}( .*)", text)]


def recipes() -> dict[str, str]:
    """The recipes of algorithms.md: name -> flags."""
    lines = re.sub(r"\n {3,}", " ", blocks("algorithms", "")[-1]).splitlines()
    return dict(re.split(r"  +", line, maxsplit=1) for line in lines)


def write_files(name: str, folder: Path) -> list[str]:
    """Write the Python blocks whose first line is a comment with a file name; the names."""
    files = dict(re.findall(r"^# (\w+\.py)\n(.*)", block, flags=re.DOTALL)[0] for block in blocks(name, "python"))
    for file, text in files.items():
        (folder / file).write_text(text)
    return list(files)


def train(run: Run, folder: Path, lines: Sequence[Sequence[str]]) -> None:
    """Train in a tiny form with each line of flags, all in one process."""
    small = [[MODELS.get(word, word) for word in line] + SMALL.split() for line in lines]
    printed = run([sys.executable, "-c", TRAIN, *("\t".join(line) for line in small)], folder)
    assert printed.splitlines().count("done") == len(lines)


@pytest.mark.parametrize("name", DOCS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)", DOCS[name])
    paths = re.findall(r"`((?:openppo|examples|tests)/[\w/.]+)`", DOCS[name])
    assert [link for link in links if not (REPO / "docs" / link).exists()] == []
    assert [path for path in paths if not (REPO / path).exists()] == []


@pytest.mark.parametrize("name", DOCS)
def test_names_in_backticks_exist_in_the_code(name: str) -> None:
    code = "\n".join(file.read_text() for file in (REPO / "openppo").rglob("*.py"))
    words = set(re.findall(r"\w+", code + (REPO / "tests/unit/cli/test_openrlhf.py").read_text()))
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", DOCS[name]))
    assert sorted(named - words) == []


def test_parts_run(run: Run, workshop: Path) -> None:
    program = "\n".join(f"exec({block!r}, {{}})" for block in blocks("parts", "python"))
    assert "reward" in run([sys.executable, "-c", program.replace('"MODEL"', '"policy"')], workshop)


def test_recipes_of_algorithms_run(run: Run, workshop: Path) -> None:
    assert len(recipes()) == 10
    common = "--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl --reward_clip_range -1 1".split()
    train(run, workshop, [[*common, *flags.replace(" 4096", " 2").split()] for flags in recipes().values()])


def test_rewards_run(run: Run, workshop: Path) -> None:
    files = write_files("rewards", workshop)
    assert len(files) == 6
    common = "--pretrain policy --prompt_data prompts.jsonl".split()
    functions = [[*common, "--remote_rm_url" if file.startswith("openrlhf") else "--reward_fn", file] for file in files]
    lines = commands("rewards", "train_ppo")
    assert len(lines) == 3
    train(run, workshop, [*functions, *lines])


def test_the_command_that_serves_a_reward_model_is_one() -> None:
    (flags,) = commands("rewards", "serve_rm")
    config = parse_options(ServeRMConfig, flags)
    config.validate(1)
    assert config.server.port == 5000


def test_security_runs(run: Run, workshop: Path) -> None:
    """The server is asked by the run, on loopback and a free port; its token is in no file and no output."""
    folder = workshop / "security"
    folder.mkdir()
    make_token, *_ = (block for block in blocks("security", "bash") if "secrets" in block)
    run(["bash", "-c", make_token], workshop)
    token = (workshop / "token").read_text().strip()
    assert (len(token), (workshop / "token").stat().st_mode & 0o077) == (64, 0)

    trusting, remote = commands("security", "train_ppo")
    (serve,) = commands("security", "serve_rm")
    parse_options(ServeRMConfig, serve).validate(1)
    serve = [{"0.0.0.0": "127.0.0.1", "5000": "0", **MODELS}.get(word, word) for word in serve]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "openppo.cli.serve_rm", *serve],
        cwd=workshop,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        found = next(match for line in server.stderr if (match := re.search(r"http://\S+/get_reward", line)))
        remote = [found[0] + "?key=pass" if "http" in word else word for word in remote]
        train(run, workshop, [[*trusting, "--save_path", "security/a"], [*remote, "--save_path", "security/b"]])
    finally:
        server.kill()
        server.wait()
    written = "".join(file.read_text() for file in folder.rglob("*.*l"))
    assert found[0] + "?***" in written
    assert "remote_rm_token_file: token" in written
    assert token not in written
    assert "key=" not in written


def test_data_runs(run: Run, workshop: Path) -> None:
    assert write_files("data", workshop) == ["rows.py"]
    train(run, workshop, commands("data", "train_ppo"))


def test_lora_runs(run: Run, workshop: Path) -> None:
    train(run, workshop, commands("lora", "train_ppo"))
    (block,) = blocks("lora", "python")
    (merge,) = commands("lora", "merge_lora")
    run([sys.executable, "-c", block], workshop)
    run([sys.executable, "-m", "openppo.cli.merge_lora", *merge], workshop)
    assert (workshop / "ckpt/lora_merged/model.safetensors").is_file()


def test_the_dry_run_of_memory_ends_without_a_trace(run: Run, workshop: Path) -> None:
    (flags,) = commands("memory", "train_ppo")
    before = sorted(workshop.rglob("*"))
    words = [MODELS.get(word, word) for word in flags] + ["--generate_max_len", "8"]
    run([sys.executable, "-m", "openppo.cli.train_ppo", *words], workshop)
    assert sorted(workshop.rglob("*")) == before


def test_the_command_of_faults_runs_and_goes_on(run: Run, workshop: Path) -> None:
    (block,) = blocks("faults", "bash")
    words = [MODELS.get(word, word) for word in shlex.split(block.replace("\\\n", " "))] + SMALL.split()
    run(words, workshop)
    assert (workshop / "ckpt/elastic/model.safetensors").is_file()
    run(words, workshop)


def test_a_command_line_of_openrlhf_runs_with_its_launcher(run: Run, workshop: Path) -> None:
    flags = """
        --pretrain policy --reward_pretrain reward --save_path openrlhf --save_steps -1 --logging_steps 1
        --eval_steps -1 --micro_train_batch_size 2 --train_batch_size 4 --micro_rollout_batch_size 4
        --rollout_batch_size 4 --max_epochs 1 --prompt_max_len 64 --generate_max_len 4 --zero_stage 2 --bf16
        --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data prompts.jsonl
        --input_key input --apply_chat_template --max_samples 8 --normalize_reward
        --gradient_checkpointing --load_checkpoint
    """  # of its example for Llama, without --flash_attn (may not be installed) and --adam_offload (would be compiled)
    launcher = re.search(r"^deepspeed --module openppo\S+", "".join(blocks("openrlhf", "bash")), flags=re.MULTILINE)
    assert launcher is not None
    run(f"{launcher[0]} {flags}".replace("--module", "--num_gpus 1 --module"), workshop)
    assert (workshop / "openrlhf" / "model.safetensors").is_file()


def test_watching_runs_with_traces_histograms_and_wandb_offline(run: Run, workshop: Path) -> None:
    watched, offline = commands("watching", "train_ppo")
    if importlib.util.find_spec("wandb") is None:
        offline = [word for word in offline if word != "--use_wandb"]
    train(run, workshop, [watched, offline])
    assert list((workshop / "ckpt/watched/logs/profile").glob("step_00000002_rank_0.json.gz"))
    assert list((workshop / "ckpt/tensorboard").iterdir())
    if importlib.util.find_spec("wandb") is not None:
        assert list((workshop / "ckpt/offline/logs/wandb").glob("offline-run-*/*.wandb"))
