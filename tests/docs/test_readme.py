"""What README shows is what runs: its Python blocks, its training commands and the scripts to copy, in a tiny form."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[2]
README = (REPO / "README.md").read_text()
Run = Callable[..., str]
SMALL = """--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 2 --micro_train_batch_size 2
    --generate_max_len 4 --prompt_max_len 64 --max_samples 8""".split()


def blocks(language: str) -> list[str]:
    """Fenced code of README in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def tiny(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands need."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("policy", "reward", "prompts.jsonl", "sft.jsonl", "preference.jsonl", "math.jsonl"):
        (folder / name).symlink_to(workshop / name)
    function = next(block for block in blocks("python") if block.startswith("def reward_fn"))
    (folder / "reward.py").write_text(function)
    return folder


def training_commands() -> list[str]:
    found = [block for block in blocks("bash") if "openppo.cli.train" in block and "STORIES" not in block]
    return [block.replace("\\\n", " ").strip() for block in found if block.startswith("torchrun")]


def test_readme_has_commands_for_one_gpu_and_for_eight() -> None:
    assert [re.search(r"nproc_per_node (\d+)", command)[1] for command in training_commands()] == ["1", "1", "8"]


def test_script_to_copy_has_the_flags_of_the_readme() -> None:
    script = (REPO / "examples/scripts/train_ppo.sh").read_text()
    words = [word for word in shlex.split(training_commands()[2]) if word.startswith("--")]
    assert [word for word in words if word not in script] == []
    for choice in ("--zero_stage 3", "--gradient_checkpointing", "--bf16"):
        assert choice in script


def test_the_expected_curves_of_the_examples_are_of_the_run_shown_here() -> None:
    examples = (REPO / "docs/examples.md").read_text()
    curves = [re.findall(r"^\w+ over \d+ steps +\S+", text, flags=re.MULTILINE) for text in (README, examples)]
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"[A-Z]+_(?:TIME|OUTPUT|RESULT|COMMAND)\b", README) == []


@pytest.fixture(scope="module")
def trained(run: Run, tiny: Path) -> list[Path]:
    """What each training command of README saved."""
    replaced = {
        "openai/gsm8k@main": "math.jsonl",
        "Qwen/Qwen2.5-0.5B-Instruct": "policy",
        "meta-llama/Llama-3.1-8B-Instruct": "policy",
        "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "reward",
    }
    saved = []
    for command in training_commands():
        words = shlex.split(re.sub(r"(nproc_per_node) 8", r"\1 2", command))
        run([replaced.get(word, word) for word in words] + SMALL, tiny)
        saved.append(tiny / words[words.index("--save_path") + 1])
    return saved


def test_training_commands_of_the_readme_run(trained: list[Path]) -> None:
    assert len(trained) == 3
    for saved, command in zip(trained, training_commands(), strict=True):
        assert (saved / ("adapter" * ("--lora_rank" in command) + "_model.safetensors").removeprefix("_")).is_file()
        assert len((saved / "logs/metrics.jsonl").read_text().splitlines()) == 2


def test_evaluation_command_of_the_readme_runs(run: Run, tiny: Path) -> None:
    (block,) = (block for block in blocks("bash") if "openppo.cli.evaluate" in block)
    words = shlex.split(block.replace("\\\n", " "))
    replaced = {"ckpt/ppo": "policy", "256": "4", "python": sys.executable}
    table = run([replaced.get(word, word) for word in words], tiny)
    assert "pass@1" in table and "pass@8" in table


def test_loss_block_runs() -> None:
    (block,) = (block for block in blocks("python") if "PolicyLoss(" in block)
    tensors = {name: torch.randn(2, 5) for name in ("log_probs", "old_log_probs", "advantages")}
    names = {**tensors, "action_mask": torch.ones(2, 5, dtype=torch.bool)}
    exec(block, names)
    assert names["loss"].isfinite()


def test_own_loop_runs(run: Run, tiny: Path) -> None:
    (block,) = (block for block in blocks("python") if "build_ppo_trainer" in block)
    small = 'label_key="label", max_samples=4, rollout_batch_size=4, train_batch_size=4, generate_max_len=4, '
    block = block.replace('"MODEL"', '"policy"').replace('reward_fn="reward.py",', f'reward_fn="reward.py", {small}')
    block += "\nprint('reward', metrics['reward'])"
    assert "reward" in run([sys.executable, "-c", block], tiny)
