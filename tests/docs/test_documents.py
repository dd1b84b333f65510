"""What README and the documents show is what runs: their Python blocks, commands and recipes, in a tiny form."""

import dataclasses
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.config.fields import spelling
from openppo.config.recipe_files import recipe_names
from openppo.experience import ESTIMATORS
from openppo.models import POLICY_LOSSES
from openppo.sources.task_file import read_tasks
from tests.docs.conftest import REPO, Run, train

FOLDER = REPO / "docs"
DOCS = {
    str(f.relative_to(FOLDER).with_suffix("")): f.read_text() for f in sorted(FOLDER.rglob("*.md"))
}
DOCS["README"] = (REPO / "README.md").read_text()
ALGORITHMS = sorted(name for name in DOCS if name.startswith("algorithms/"))
SMALL = (
    "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --micro_train_batch_size 2 "
    "--generate_max_len 4 --prompt_max_len 64 --max_samples 8"
).split()
NAMES_OF_OTHERS = {"clip_cov", "dppo_kl", "dppo_tv", "geo_mean", "grpo_passk", "kl_cov", "train_kd"}
"""Algorithms of verl, and a command of OpenRLHF, that are named only because there is none of them here."""
MODELS = {
    "heldout.jsonl": "prompts.jsonl",
    "sums.jsonl": "prompts.jsonl",
    "gsm8k/train.parquet": "prompts.jsonl",
    "gsm8k/test.parquet": "prompts.jsonl",
    "MODEL": "policy",
    "PRM": "policy",
    "REWARD_MODEL": "reward",
    "openai/gsm8k@main": "math.jsonl",
    "Qwen/Qwen2.5-7B-Instruct": "policy",
    "Qwen/Qwen2.5-0.5B-Instruct": "policy",
    "meta-llama/Llama-3.1-8B-Instruct": "policy",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "reward",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "reward",
}
OPENPPO = [sys.executable, "-m", "openppo"]


def blocks(name: str, language: str) -> list[str]:
    """Fenced blocks of a document in one language ('' for plain ones)."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS[name], flags=re.DOTALL | re.MULTILINE)


def commands(name: str, command: str = "train_ppo") -> list[list[str]]:
    """The flags of each ``python -m openppo.cli.<command>`` in a document."""
    text = "".join(blocks(name, "bash")).replace("\\\n", " ")
    return [shlex.split(flags) for flags in re.findall(rf"openppo\.cli\.{command}( .*)", text)]


def write_files(name: str, folder: Path) -> list[str]:
    """Write the Python blocks whose first line is a comment with a file name; the names."""
    named = [
        re.match(r"# (\w+\.py)\n(.*)", block, flags=re.DOTALL) for block in blocks(name, "python")
    ]
    files = {match[1]: match[2] for match in named if match}
    for file, text in files.items():
        (folder / file).write_text(text)
    return list(files)


def tiny_words(words: Sequence[str]) -> list[str]:
    """A documented command in a tiny form."""
    return [*(MODELS.get(word, word) for word in words), *SMALL]


def train_tiny(run: Run, folder: Path, lines: Sequence[Sequence[str]]) -> None:
    """Train in a tiny form with each line of flags."""
    train(run, folder, [["train_ppo", *tiny_words(line)] for line in lines])


def run_blocks(
    run: Run, folder: Path, names: Sequence[str], replaced: dict[str, str] | None = None
) -> str:
    """Run the Python blocks of some documents, each on its own, all in one process; what they print."""
    program = "\n".join(
        f"exec({block!r}, {{}})" for name in names for block in blocks(name, "python")
    )
    for old, new in (replaced or {}).items():
        assert old in program
        program = program.replace(old, new)
    return run([sys.executable, "-c", program], folder)


@pytest.mark.parametrize("name", DOCS)
def test_names_and_paths_in_backticks_lead_somewhere(name: str) -> None:
    """Links are checked by the build of the pages, see test_site.py; others stand in openppo/config/foreign."""
    paths = re.findall(r"`((?:openppo|examples|tests)/[\w/.]+)`", DOCS[name])
    assert [path for path in paths if not (REPO / path).exists()] == []
    code = "\n".join(file.read_text() for file in (REPO / "openppo").rglob("*.py"))
    words = set(re.findall(r"\w+", code + (REPO / "tests/unit/cli/test_openrlhf.py").read_text()))
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", DOCS[name])) - words
    held_out = {metric for metric in named if metric.removeprefix("eval_") in words}
    assert named - held_out <= NAMES_OF_OTHERS


def test_the_code_of_algorithms_runs(run: Run, tmp_path: Path) -> None:
    """Each block states what the formula above it gives."""
    assert (
        sum(block.count("assert ") for name in ALGORITHMS for block in blocks(name, "python")) > 30
    )
    run_blocks(run, tmp_path, ALGORITHMS)


def test_every_estimator_loss_and_option_of_an_algorithm_has_its_page() -> None:
    pages = "".join(DOCS[name] for name in ALGORITHMS)
    assert [
        name for name in (*ESTIMATORS, *POLICY_LOSSES) if f"algorithms/{name}" not in DOCS
    ] == []
    linked = re.findall(r"\((\w+)\.md\)", DOCS["algorithms/index"])
    assert {f"algorithms/{name}" for name in linked} >= set(ALGORITHMS) - {"algorithms/index"}
    groups = [
        get_type_hints(TrainPPOConfig)[group] for group in ("shaping", "advantage", "kl", "loss")
    ]
    options = [spelling(option) for group in groups for option in dataclasses.fields(group)]
    options += [
        "--dynamic_sampling",
        "--value_pretrain_steps",
        "--freezing_actor_steps",
        "--ptx_coef",
        "--ema_beta",
    ]
    assert [option for option in options if option not in pages] == []


def test_recipes_of_algorithms_run(run: Run, workshop: Path) -> None:
    lines = re.sub(r"\n {3,}", " ", blocks("algorithms/index", "")[-1]).splitlines()
    recipes = [re.split(r"  +", line, maxsplit=1)[1] for line in lines]
    assert len(recipes) == 6
    recipes += [f"--recipe {name}" for name in recipe_names() if name != "dapo"]
    recipes.append("--recipe dapo --overlong_buffer_len 4096")
    common = "--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl --reward_clip_range -1 1".split()
    train_tiny(
        run, workshop, [[*common, *flags.replace(" 4096", " 2").split()] for flags in recipes]
    )


def test_training_commands_of_the_readme_run(run: Run, workshop: Path) -> None:
    (workshop / "reward.py").write_text(blocks("README", "python")[0])
    assert write_files("README", workshop) == ["agent.py"]
    words = [
        shlex.split(block.replace("\\\n", " "))
        for block in blocks("README", "bash")
        if "cli.train" in block
    ]
    assert [line[line.index("--nproc_per_node") + 1] for line in words] == ["1", "1", "8", "2"]
    for line in words[
        1:
    ]:  # the first one is run by its flags below, and the others by their launcher
        run(re.sub(r"(nproc_per_node) 8", r"\1 2", shlex.join(tiny_words(line))), workshop)
        assert len((workshop / line[-1] / "logs/metrics.jsonl").read_text().splitlines()) == 2
    train_tiny(run, workshop, [commands("README")[0]])
    (evaluation,) = commands("README", "evaluate")
    table = run(
        [*OPENPPO, "evaluate", *[{"256": "4"}.get(word, word) for word in evaluation]], workshop
    )
    assert "pass@1" in table and "pass@8" in table
    script = (REPO / "examples/scripts/train_ppo.sh").read_text()
    assert [
        word
        for word in words[2]
        if word.startswith("--") and word not in ("--standalone", *script.split())
    ] == []


def test_the_expected_curves_of_the_examples_are_of_the_run_shown_in_the_readme() -> None:
    pattern = re.compile(r"^\w+ over \d+ steps +\S+", flags=re.MULTILINE)
    curves, others = (pattern.findall(DOCS[name]) for name in ("README", "examples"))
    assert len(curves) == 2
    assert curves == others


SIZES = (
    'rollout_batch_size=4, train_batch_size=4, generate_max_len=4, max_samples=4, pretrain="policy"'
)
BLOCKS = {
    "index": ({'pretrain="MODEL"': SIZES, "REWARD_MODEL": "reward"}, ""),
    "internals": ({}, "gradient norm"),
    "trl": (
        {
            **{
                '"MODEL"': '"policy"',
                "REWARD_MODEL": "reward",
                "heldout": "prompts",
                "=53": "=4",
                "=10000": "=8",
            },
            **{
                "batch_size=64": "batch_size=4",
                "batch_size=16": "batch_size=2",
                "max_epochs=4": "max_epochs=1",
            },
        },
        "",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run(name: str, run: Run, workshop: Path) -> None:
    replaced, printed = BLOCKS[name]
    assert printed in run_blocks(run, workshop, [name], replaced)


def test_the_code_of_parts_runs_exactly_as_shown(run: Run, workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "MODEL").symlink_to(workshop / "policy")
    printed = run_blocks(run, tmp_path, ["parts"])
    assert all(
        said in printed
        for said in ("KL per token", "the policy loss inside Accelerate is", "train_loss")
    )


def test_the_code_of_objects_runs_exactly_as_shown_and_resumes(
    run: Run, workshop: Path, tmp_path: Path
) -> None:
    (tmp_path / "MODEL").symlink_to(workshop / "policy")
    for _ in range(2):
        run_blocks(run, tmp_path, ["objects"])
        assert len((tmp_path / "ckpt/objects/logs/metrics.jsonl").read_text().splitlines()) == 2
    assert (
        "prompt_data: (given in Python)" in (tmp_path / "ckpt/objects/logs/config.yaml").read_text()
    )


def test_each_name_beside_one_of_openrlhf_imports() -> None:
    rows = [
        row.split("|")
        for row in DOCS["parts"].partition("| OpenRLHF 0.6.1 |")[2].splitlines()[2:]
        if row[:1] == "|"
    ]
    old = " ".join(row[1] for row in rows)
    asked = "Actor Experience Samples compute_reward normalize backward NaiveExperienceMaker"
    assert [name for name in asked.split() if not re.search(rf"\b{name}\b", old)] == []
    for row in rows:
        names = re.findall(r"`([^`]+)`", row[2])
        assert names and all(map(pkgutil.resolve_name, names))


def test_python_blocks_of_the_readme_run(run: Run, workshop: Path) -> None:
    reward, *others = blocks("README", "python")
    (workshop / "reward.py").write_text(reward)
    tensors = "import torch\nlog_probs, old_log_probs, advantages = torch.randn(3, 2, 5)\naction_mask = log_probs < 9\n"
    for block in others:
        small = f'label_key="label", {SIZES}'
        block = tensors * ("PolicyLoss(" in block) + block.replace('pretrain="MODEL"', small)
        run([sys.executable, "-c", block], workshop)


def test_the_format_check_reads_what_the_prompt_begins(tmp_path: Path) -> None:
    write_files("rewards", tmp_path)
    check = runpy.run_path(str(tmp_path / "thinks.py"))["reward_fn"]
    asked = "<|user|>Think in <think> and </think>.<|end|><|assistant|>"
    for begun, response, reward in (
        ("<think>\n", "2+1</think>3", 1.0),
        ("", "<think>2+1</think>3", 1.0),
        ("<think>\n", "2+1</think>", 0.0),
        ("<think>\n", "3", 0.0),
        ("", "3", 0.0),
    ):
        assert check(query=asked + begun + response + "<|end|>", response=response) == reward


def test_commands_of_index_data_trl_and_rewards_run_with_each_reward(
    run: Run, workshop: Path
) -> None:
    assert write_files("data", workshop) == ["rows.py"]
    files, lines = write_files("rewards", workshop), commands("rewards")
    assert (len(files), len(lines)) == (11, 5)
    common = "--pretrain policy --prompt_data prompts.jsonl".split()
    functions = [
        [*common, "--remote_rm_url" if file.startswith("openrlhf") else "--reward_fn", file]
        for file in files
    ]
    trl = [[*line, "--max_epochs", "1"] for line in commands("trl")]
    train_tiny(run, workshop, [*commands("index"), *commands("data"), *trl, *functions, *lines])


def test_the_command_of_distillation_runs_and_so_does_it_with_tools(
    run: Run, workshop: Path
) -> None:
    write_files("agents/index", workshop)
    (line,) = commands("algorithms/distillation")
    with_tools = [*line, *"--tools adder.py --episode_max_len 300 --save_path ckpt/tools".split()]
    train_tiny(run, workshop, [line, with_tools])
    last = (workshop / "ckpt/tools/logs/metrics.jsonl").read_text().splitlines()[-1]
    assert '"agent/completed"' in last and '"eval_kl"' in last and "reward" not in last


def test_each_form_of_an_agent_runs(run: Run, workshop: Path) -> None:
    """The program with a client that is not installed here is run by tests/agents_clients."""
    assert write_files("agents/index", workshop) == [
        "adder.py",
        "higher.py",
        "my_agent.py",
        "agent.py",
    ]
    tools, game, _, agent = commands("agents/index")
    smaller = "--n_envs 4 --max_steps 2 --eval_n_envs 2 --episode_max_len 300".split()
    seeds = [
        *(MODELS.get(word, word) for word in game),
        *SMALL[2:],
        *smaller,
    ]  # without --rollout_batch_size
    common = [
        ["train_ppo", *tiny_words(line), "--episode_max_len", "300"] for line in (tools, agent)
    ]
    train(run, workshop, [*common, ["train_ppo", *seeds]])
    (loop,) = (block for block in blocks("agents/index", "python") if "build_ppo_trainer" in block)
    loop = loop.replace('pretrain="MODEL"', SIZES).replace(", generate_max_len=256", "")
    run([sys.executable, "-c", loop.replace("sums.jsonl", "prompts.jsonl")], workshop)
    (evaluation,) = commands("agents/index", "evaluate")
    words = [
        {"256": "4", "ckpt/agent": "policy", "heldout.jsonl": "prompts.jsonl"}.get(w, w)
        for w in evaluation
    ]
    assert "agent/completed" in run([*OPENPPO, "evaluate", *words], workshop)
    assert '"messages"' in (workshop / "episodes.jsonl").read_text()


def test_many_tasks_train_together(run: Run, workshop: Path) -> None:
    write_files("agents/index", workshop)
    file, service = blocks("agents/tasks", "yaml")
    smaller = {
        "sums.jsonl": "prompts.jsonl",
        "generate_max_len: 64": "generate_max_len: 4",
        "size: 16": "size: 2",
    }
    for old, new in smaller.items():
        assert old in file
        file = file.replace(old, new)
    (workshop / "tasks.yaml").write_text(file)
    (line,) = commands("agents/tasks")
    few = "--max_steps 3 --episode_max_len 300 --eval_steps 3 --save_path ckpt/tasks".split()
    train(run, workshop, [["train_ppo", *tiny_words(line), *few]])
    last = (workshop / "ckpt/tasks/logs/metrics.jsonl").read_text().splitlines()[-1]
    assert all(f'"task/{name}/share"' in last for name in ("sums", "math", "game"))
    (workshop / "service.yaml").write_text(service)
    assert [task["agent"] for task in read_tasks(workshop / "service.yaml")] == [
        "http://127.0.0.1:9000"
    ]


def test_the_first_hour_runs(run: Run, workshop: Path) -> None:
    """In its order; the quickstart itself is run by tests/learning, and the installation by tests/packaging."""
    hour = workshop / "hour"
    hour.mkdir()
    for name in ("policy", "reward", "prompts.jsonl"):
        (hour / name).symlink_to(workshop / name)
    run(
        [
            sys.executable,
            str(REPO / "examples/sort_letters.py"),
            *"make --out quickstart --seed 0".split(),
        ],
        hour,
    )
    (hour / "quickstart/model").rename(
        hour / "quickstart/sft"
    )  # as large as the quickstart's, and as short of context
    assert write_files("first-hour", hour) == ["make_prompts.py", "reward.py"]
    bash = blocks("first-hour", "bash")
    # tests/distributed/test_commands.py talks with a model
    assert [block.split()[0] for block in bash[:5]] == ["git", "pip", "bash", ".", "openppo"]
    lines = [line for block in bash[5:] for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 6
    (options,) = blocks("first-hour", "yaml")
    (hour / "mine.yaml").write_text(options)
    programs = {"openppo": OPENPPO, "python": [sys.executable]}
    small = [word for word in SMALL if word not in ("--prompt_max_len", "64")]
    for line in lines:
        line = re.sub(r"(nproc_per_node) 8", r"\1 1", line)
        program, *words = [MODELS.get(word, word) for word in shlex.split(line)]
        more = [] if len(words) == 1 or "--dry_run" in words else small
        run([*programs.get(program, [program]), *words, *more], hour)
    first = next(
        block for block in blocks("first-hour", "python") if block.startswith("import json")
    )
    assert run([sys.executable, "-c", first], hour).split()[0] == "1"
    for saved in ("mine/model", "lora/adapter_model", "ppo/model"):
        assert (hour / "ckpt" / f"{saved}.safetensors").is_file()


def test_command_and_block_that_replace_a_script_of_trl_ask_for_the_same_run() -> None:
    (line,) = commands("trl")
    (block,) = blocks("trl", "python")
    names: dict[str, Any] = {}
    imported = "from openppo.trainer import build_ppo_trainer, quiet_libraries\n"
    exec(
        block.split("trainer = ")[0].replace(imported, "").replace("quiet_libraries()\n", ""), names
    )
    assert parse_options(TrainPPOConfig, line) == names["config"]


def test_the_command_that_replaces_one_of_verl_runs(run: Run, workshop: Path) -> None:
    assert write_files("verl", workshop) == ["compute_score.py"]
    (line,) = commands("verl")
    train_tiny(run, workshop, [[*line, "--num_episodes", "1", "--eval_steps", "1"]])
    assert '"eval_reward' in (workshop / "ckpt/from_verl/logs/metrics.jsonl").read_text()


def test_the_command_of_checkpoints_runs_and_resumes(run: Run, workshop: Path) -> None:
    (flags,) = commands("checkpoints")
    flags[flags.index("--save_steps") + 1] = "1"
    for _ in range(2):
        run([*OPENPPO, "train_ppo", *tiny_words(flags)], workshop)
    assert len((workshop / "ckpt/run/logs/metrics.jsonl").read_text().splitlines()) == 2
    run([*OPENPPO, "export", *commands("checkpoints", "export")[0]], workshop)
    exported = (workshop / "ckpt/exported/model.safetensors").read_bytes()
    assert exported == (workshop / "ckpt/run/model.safetensors").read_bytes()


def test_a_callback_and_a_condition_end_their_runs(run: Run, workshop: Path) -> None:
    (flags,) = commands("callbacks")
    run(
        [
            *OPENPPO,
            "train_ppo",
            *tiny_words([{"kl > 0.2": "kl > -1"}.get(word, word) for word in flags]),
        ],
        workshop,
    )
    assert len((workshop / "ckpt/stopped/logs/metrics.jsonl").read_text().splitlines()) == 1
    small = SIZES.replace("max_samples=4", "max_samples=8")
    run_blocks(
        run,
        workshop,
        ["callbacks"],
        {'pretrain="MODEL"': small, "REWARD_MODEL": "reward", "10_000_000": "1"},
    )
    assert [line[:2] for line in (workshop / "tokens.csv").read_text().splitlines()] == ["1,"]
    assert (workshop / "ckpt/budget/model.safetensors").is_file()


def test_lora_runs(run: Run, workshop: Path) -> None:
    begun = [words for words in commands("lora") if "--lora_path" not in words]
    train_tiny(run, workshop, begun)  # test_lora_path.py runs the others
    run_blocks(run, workshop, ["lora"])
    run([*OPENPPO, "merge_lora", *commands("lora", "merge_lora")[0]], workshop)
    assert (workshop / "ckpt/lora_merged/model.safetensors").is_file()


def test_the_dry_run_of_memory_ends_without_a_trace(run: Run, workshop: Path) -> None:
    before = sorted(workshop.rglob("*"))
    run(
        [*OPENPPO, "train_ppo", *[MODELS.get(word, word) for word in commands("memory")[0]]],
        workshop,
    )
    assert sorted(workshop.rglob("*")) == before
