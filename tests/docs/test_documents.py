"""What the documents show is what runs: their Python blocks, commands and recipes, in a tiny form."""

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from openppo.cli.options import parse_options
from openppo.config import ServeRMConfig, TrainPPOConfig
from openppo.experience import ESTIMATORS
from openppo.models import POLICY_LOSSES

REPO = Path(__file__).parents[2]
FOLDER = REPO / "docs"
DOCS = {str(f.relative_to(FOLDER).with_suffix("")): f.read_text() for f in sorted(FOLDER.rglob("*.md"))}
ALGORITHMS = sorted(name for name in DOCS if name.startswith("algorithms/"))
PPO_CONFIG = """
    learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
    num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty
    sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size
    local_mini_batch_size mini_batch_size push_to_hub reward_model_path model_adapter_name ref_adapter_name
    num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam
    ds3_gather_for_generation
""".split()
"""Fields of PPOConfig in TRL 1.12.0, as its source has them."""
TRAINING_ARGUMENTS = """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs per_device_eval_batch_size
    gradient_checkpointing bf16 lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm seed
    logging_steps report_to save_steps save_total_limit resume_from_checkpoint eval_steps eval_strategy deepspeed
    peft_config callbacks fp16 fsdp use_liger_kernel torch_empty_cache_steps
""".split()
"""What its trainer reads beside them, or users give it."""
RUN_BY = {
    "index": "test_the_first_page_runs",
    "first-hour": "test_the_first_hour_runs",
    "examples": "test_a_loop_of_ones_own_teaches_a_model_to_sort_letters",
    "data": "test_data_runs",
    "rewards": "test_rewards_run",
    "lora": "test_lora_runs",
    "memory": "test_the_dry_run_of_memory_ends_without_a_trace",
    "vllm": "test_a_documented_command_is_valid_as_written",
    "checkpoints": "test_the_command_of_checkpoints_runs_and_goes_on",
    "callbacks": "test_a_callback_and_a_condition_end_their_runs",
    "hosts": "test_the_loop_over_ssh_runs",
    "faults": "test_the_command_of_faults_runs_and_goes_on",
    "troubleshooting": "test_version_prints_what_a_bug_report_needs",
    "security": "test_security_runs",
    "openrlhf": "test_a_command_line_of_openrlhf_runs_with_its_launcher",
    "trl": "test_what_replaces_a_script_of_trl_runs",
    "parts": "test_parts_run",
    "internals": "test_internals_run",
    "watching": "test_watching_runs_with_traces_histograms_and_wandb_offline",
    "report": "test_the_commands_of_the_report_write_it",
    "versions": "test_two_versions_are_kept_beside_each_other",
}
"""The test that executes the code of each document; those on algorithms run in one."""
NAMES_OF_TRL = {*PPO_CONFIG, *TRAINING_ARGUMENTS, "scale_rewards", "mask_truncated_completions", "epsilon_high"}
SMALL = (
    "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --micro_train_batch_size 2 "
    "--generate_max_len 4 --max_samples 8"
)
MODELS = {
    "heldout.jsonl": "prompts.jsonl",
    "MODEL": "policy",
    "PRM": "policy",
    "REWARD_MODEL": "reward",
    "Qwen/Qwen2.5-7B-Instruct": "policy",
    "Qwen/Qwen2.5-0.5B-Instruct": "policy",
    "meta-llama/Llama-3.1-8B-Instruct": "policy",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "reward",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "reward",
}
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
    """The recipes of the page on algorithms: name -> flags."""
    lines = re.sub(r"\n {3,}", " ", blocks("algorithms/index", "")[-1]).splitlines()
    return dict(re.split(r"  +", line, maxsplit=1) for line in lines)


def write_files(name: str, folder: Path) -> list[str]:
    """Write the Python blocks whose first line is a comment with a file name; the names."""
    named = [re.match(r"# (\w+\.py)\n(.*)", block, flags=re.DOTALL) for block in blocks(name, "python")]
    files = {match[1]: match[2] for match in named if match}
    for file, text in files.items():
        (folder / file).write_text(text)
    return list(files)


def train(run: Run, folder: Path, lines: Sequence[Sequence[str]]) -> None:
    """Train in a tiny form with each line of flags, all in one process."""
    printed = run([sys.executable, "-c", TRAIN, *("\t".join(tiny_words(line)) for line in lines)], folder)
    assert printed.splitlines().count("done") == len(lines)


def run_blocks(run: Run, folder: Path, names: Sequence[str], replaced: dict[str, str] | None = None) -> str:
    """Run the Python blocks of some documents, each on its own, all in one process; what they print."""
    program = "\n".join(f"exec({block!r}, {{}})" for name in names for block in blocks(name, "python"))
    for old, new in (replaced or {}).items():
        assert old in program
        program = program.replace(old, new)
    return run([sys.executable, "-c", program], folder)


def tiny_words(words: Sequence[str]) -> list[str]:
    """A documented command in a tiny form."""
    return [*(MODELS.get(word, word) for word in words), *SMALL.split()]


def train_ppo(run: Run, folder: Path, words: Sequence[str]) -> None:
    """Train with a documented command in a tiny form, in a process of its own."""
    run([sys.executable, "-m", "openppo.cli.train_ppo", *tiny_words(words)], folder)


@pytest.mark.parametrize("file", [REPO / "README.md", *sorted(FOLDER.rglob("*.md"))], ids=lambda file: file.stem)
def test_paths_in_backticks_lead_somewhere(file: Path) -> None:
    """Links are checked by the build of the pages, see test_site.py."""
    paths = re.findall(r"`((?:openppo|examples|tests)/[\w/.]+)`", file.read_text())
    assert [path for path in paths if not (REPO / path).exists()] == []


def test_every_document_with_code_has_a_test_that_runs_it() -> None:
    with_code = {name for name in DOCS if blocks(name, "bash") or blocks(name, "python")}
    assert with_code == RUN_BY.keys() | set(ALGORITHMS) - {name for name in ALGORITHMS if not blocks(name, "python")}
    tests = "".join(file.read_text() for file in (REPO / "tests").rglob("test_*.py"))
    assert [test for test in RUN_BY.values() if f"def {test}(" not in tests] == []


@pytest.mark.parametrize("name", DOCS)
def test_names_in_backticks_exist_in_the_code(name: str) -> None:
    code = "\n".join(file.read_text() for file in (REPO / "openppo").rglob("*.py"))
    words = set(re.findall(r"\w+", code + (REPO / "tests/unit/cli/test_openrlhf.py").read_text()))
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", DOCS[name]))
    assert sorted(named - words - NAMES_OF_TRL) == []


def test_the_code_of_algorithms_runs(run: Run, tmp_path: Path) -> None:
    """Each block states what the formula above it gives."""
    assert sum(block.count("assert ") for name in ALGORITHMS for block in blocks(name, "python")) > 30
    run_blocks(run, tmp_path, ALGORITHMS)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"algorithms/index"}))
def test_a_page_on_an_algorithm_has_formula_code_differences_and_use(name: str) -> None:
    titles = re.findall(r"^## (.+)$", DOCS[name], flags=re.MULTILINE)
    assert titles == ["Formula", "In the code", "What differs", "When to use it"]
    assert f"({name.removeprefix('algorithms/')}.md)" in DOCS["algorithms/index"]
    code = DOCS[name].split("## In the code")[1].split("## What differs")[0]
    places = re.findall(r"`(\w+)`(?: and `(\w+)`)? in\s+`(openppo/[\w/]+\.py)`", code)
    assert places or re.search(r"`openppo/[\w/]+\.py`", code)
    for *symbols, file in places:
        text = (REPO / file).read_text()
        assert [s for s in symbols if s and not re.search(rf"^(?:class|def) {s}\b|^{s}\b", text, flags=re.M)] == []


def test_every_estimator_loss_and_option_of_an_algorithm_has_its_page() -> None:
    pages = "".join(DOCS[name] for name in ALGORITHMS)
    assert [name for name in (*ESTIMATORS, *POLICY_LOSSES) if f"algorithms/{name}" not in DOCS] == []
    types = [get_type_hints(TrainPPOConfig)[group] for group in ("shaping", "advantage", "kl", "loss")]
    options = [option.name for group in types for option in dataclasses.fields(group)]
    options += ["dynamic_sampling", "value_pretrain_steps", "freezing_actor_steps", "ptx_coef", "enable_ema"]
    assert [option for option in options if f"--{option}" not in pages] == []
    chosen = {value for group in types for hint in get_type_hints(group).values() for value in choices(hint)}
    assert {"tis", "k3", "sequence_mean"} < chosen
    assert [value for value in chosen - {"default", "on", "off"} if not re.search(rf"\b{value}\b", pages)] == []


def choices(hint: Any) -> list[str]:
    """The texts of a Literal, also inside a union."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return [value for value in inner if isinstance(value, str)]
    return [value for part in inner for value in choices(part)]


def test_the_first_page_runs(run: Run, workshop: Path) -> None:
    train(run, workshop, commands("index", "train_ppo"))
    small = 'max_samples=4, rollout_batch_size=4, train_batch_size=4, generate_max_len=4, pretrain="policy"'
    run_blocks(run, workshop, ["index"], {'pretrain="MODEL"': small, "REWARD_MODEL": "reward"})


def test_the_first_hour_runs(run: Run, workshop: Path) -> None:
    """In its order; the quickstart itself is run by tests/learning, and the installation by tests/packaging."""
    hour = workshop / "hour"
    hour.mkdir()
    for name in ("policy", "reward", "prompts.jsonl"):
        (hour / name).symlink_to(workshop / name)
    run([sys.executable, str(REPO / "examples/sort_letters.py"), *"make --out quickstart --seed 0".split()], hour)
    (hour / "quickstart/model").rename(hour / "quickstart/sft")  # as large as the quickstart's, and as short of context
    assert write_files("first-hour", hour) == ["make_prompts.py", "reward.py"]
    bash = blocks("first-hour", "bash")
    assert [block.split()[0] for block in bash[:4]] == ["git", "pip", "bash", "."]
    lines = [line for block in bash[4:] for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 5
    programs = {"openppo": [sys.executable, "-m", "openppo"], "python": [sys.executable]}
    for line in lines:
        line = re.sub(r"(nproc_per_node) 8", r"\1 1", line)
        program, *words = [MODELS.get(word, word) for word in shlex.split(line)]
        small = [] if len(words) == 1 or "--dry_run" in words else SMALL.split()
        run([*programs.get(program, [program]), *words, *small], hour)
    first = next(block for block in blocks("first-hour", "python") if block.startswith("import json"))
    assert run([sys.executable, "-c", first], hour).split()[0] == "1"
    for saved in ("mine/model", "lora/adapter_model", "ppo/model"):
        assert (hour / "ckpt" / f"{saved}.safetensors").is_file()


def test_internals_run(run: Run, tmp_path: Path) -> None:
    assert "gradient norm" in run_blocks(run, tmp_path, ["internals"])


def test_what_replaces_a_script_of_trl_runs(run: Run, workshop: Path) -> None:
    train(run, workshop, [[*line, "--max_epochs", "1"] for line in commands("trl", "train_ppo")])
    replaced = {
        '"MODEL"': '"policy"',
        "REWARD_MODEL": "reward",
        "heldout": "prompts",
        "batch_size=64": "batch_size=4",
        "batch_size=16": "batch_size=2",
        "=53": "=4",
        "=10000": "=8",
        "max_epochs=4": "max_epochs=1",
    }
    run_blocks(run, workshop, ["trl"], replaced)


def test_command_and_block_that_replace_a_script_of_trl_ask_for_the_same_run() -> None:
    (line,) = commands("trl", "train_ppo")
    (block,) = blocks("trl", "python")
    names: dict[str, Any] = {}
    exec(block.split("trainer = ")[0].replace("from openppo.trainer import build_ppo_trainer\n", ""), names)
    assert parse_options(TrainPPOConfig, line) == names["config"]


def test_every_field_of_trls_config_has_its_row() -> None:
    own, shared = DOCS["trl"].split("## Fields of PPOConfig")[1].split("## Fields of TrainingArguments")
    first_cells = ["\n".join(row.split("|")[1] for row in text.splitlines() if "|" in row) for text in (own, shared)]
    rows = DOCS["trl"]
    assert [name for name in PPO_CONFIG if f"`{name}`" not in first_cells[0] and name not in ("lam",)] == []
    assert "`lam`" in first_cells[0]
    assert [name for name in TRAINING_ARGUMENTS if f"`{name}`" not in rows] == []


def test_the_command_of_checkpoints_runs_and_goes_on(run: Run, workshop: Path) -> None:
    (flags,) = commands("checkpoints", "train_ppo")
    flags[flags.index("--save_steps") + 1] = "1"
    for _ in range(2):
        train_ppo(run, workshop, flags)
    assert len((workshop / "ckpt/run/logs/metrics.jsonl").read_text().splitlines()) == 2
    (export,) = commands("checkpoints", "export")
    run([sys.executable, "-m", "openppo.cli.export", *export], workshop)
    exported = (workshop / "ckpt/exported/model.safetensors").read_bytes()
    assert exported == (workshop / "ckpt/run/model.safetensors").read_bytes()


def test_a_callback_and_a_condition_end_their_runs(run: Run, workshop: Path) -> None:
    (flags,) = commands("callbacks", "train_ppo")
    train_ppo(run, workshop, [{"kl > 0.2": "kl > -1"}.get(word, word) for word in flags])
    assert len((workshop / "ckpt/stopped/logs/metrics.jsonl").read_text().splitlines()) == 1
    small = 'pretrain="policy", rollout_batch_size=4, train_batch_size=4, generate_max_len=4, max_samples=8'
    run_blocks(run, workshop, ["callbacks"], {'pretrain="MODEL"': small, "REWARD_MODEL": "reward", "10_000_000": "1"})
    assert (workshop / "tokens.csv").read_text().startswith("1,")
    assert len((workshop / "tokens.csv").read_text().splitlines()) == 1
    assert (workshop / "ckpt/budget/model.safetensors").is_file()


def test_parts_run(run: Run, workshop: Path) -> None:
    assert "reward" in run_blocks(run, workshop, ["parts"], {'"MODEL"': '"policy"'})


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
    (merge,) = commands("lora", "merge_lora")
    run_blocks(run, workshop, ["lora"])
    run([sys.executable, "-m", "openppo.cli.merge_lora", *merge], workshop)
    assert (workshop / "ckpt/lora_merged/model.safetensors").is_file()


def test_the_dry_run_of_memory_ends_without_a_trace(run: Run, workshop: Path) -> None:
    (flags,) = commands("memory", "train_ppo")
    before = sorted(workshop.rglob("*"))
    words = [MODELS.get(word, word) for word in flags]
    run([sys.executable, "-m", "openppo.cli.train_ppo", *words], workshop)
    assert sorted(workshop.rglob("*")) == before


def test_the_command_of_faults_runs_and_goes_on(run: Run, workshop: Path) -> None:
    (block,) = blocks("faults", "bash")
    words = tiny_words(shlex.split(block.replace("\\\n", " ")))
    run(words, workshop)
    assert (workshop / "ckpt/elastic/model.safetensors").is_file()
    run(words, workshop)


@pytest.mark.skipif(" " in sys.executable, reason="the first line of DeepSpeed's program holds no path with a space")
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
    (dashboard,) = re.findall(r"^tensorboard .*", "".join(blocks("watching", "bash")), flags=re.MULTILINE)
    assert "policy_loss" in run(f"{dashboard} --inspect", workshop), "without a server it says what it would show"
    if importlib.util.find_spec("wandb") is not None:
        assert list((workshop / "ckpt/offline/logs/wandb").glob("offline-run-*/*.wandb"))
