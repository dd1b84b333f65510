"""The tiny chat model of agent.sh, its data and its table; the commands of the pages run with it.

``tests/agents_clients/test_agent_script.py`` runs the script itself, with OpenAI's SDK.
"""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from openppo.agents.parsers import PARSERS, choose_parser
from openppo.datasets.conversation import render_chat
from openppo.datasets.template_checks import left_out
from tests.docs.conftest import REPO, Run, train

PAGES = {
    "README.md": "--agent agent.py:solve",
    "docs/agents/index.md": "--tools adder.py",
    "docs/agents/environments.md": "--environment examples/agents/number_game.py:NumberGame",
    "docs/agents/programs.md": "--agent_command",
    "docs/agents/tasks.md": "--tasks tasks.yaml",
    "docs/agents/tools.md": "--tools examples/tools/guess.py",
}
"""Part of the command for the tiny model on each page that trains."""
CLIENT = f"{shlex.quote(sys.executable)} examples/agents/second_chance.py --answer {{label}}"
"""A program for a Python without OpenAI's SDK."""
SMALL = """--max_samples 4 --n_samples_per_prompt 2 --rollout_batch_size 2 --train_batch_size 4 --generate_max_len 4
    --max_steps 2 --eval_steps 2""".split()
OF_SEEDS = [
    *SMALL[:4],
    *SMALL[6:],
    *"--n_envs 2 --eval_n_envs 2".split(),
]
"""Without --rollout_batch_size, beside which --n_envs is refused."""


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def laptop_command(page: str) -> list[str]:
    """Words of the page's command with the options for a laptop, after ``train_ppo``."""
    text = (REPO / page).read_text().replace("\\\n", " ")
    (line,) = re.findall(
        r"^openppo train_ppo (--config examples/agents/laptop.yaml .*)", text, flags=re.M
    )
    assert PAGES[page] in line
    return shlex.split(line)


@pytest.fixture(scope="session")
def demo(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples/, the files of the pages, and agent_demo/ as agent.sh leaves it, untrained."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").symlink_to(REPO / "examples")
    run(
        [sys.executable, "examples/agent_model.py", *"make --out agent_demo --seed 1".split()],
        folder,
    )
    (folder / "agent_demo/random").rename(folder / "agent_demo/model")
    for block in re.findall(r"^```python\n(.*?)^```", index(), flags=re.DOTALL | re.MULTILINE):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)
    return folder


def index() -> str:
    return (REPO / "docs/agents/index.md").read_text()


def test_the_commands_of_the_pages_run_with_the_tiny_model(run: Run, demo: Path) -> None:
    tasks = re.findall(
        r"^```yaml\n(# tasks.yaml\n.*?)^```",
        page := (REPO / "docs/agents/tasks.md").read_text(),
        flags=re.S | re.M,
    )
    assert "cp agent_demo/sums.jsonl .\n" in page
    (demo / "tasks.yaml").write_text(tasks[0].replace("64", "4").replace("size: 16", "size: 2"))
    (demo / "sums.jsonl").write_bytes((demo / "agent_demo/sums.jsonl").read_bytes())

    lines = []
    for page in PAGES:
        words = [CLIENT if "openai_sum.py" in word else word for word in laptop_command(page)]
        lines.append(["train_ppo", *words, *(OF_SEEDS if "--n_envs" in words else SMALL)])
    train(run, demo, lines)


def test_the_tiny_model_calls_tools_as_its_template_writes_them(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / "agent_demo/model")
    assert left_out(tokenizer) == set()
    parse = PARSERS[choose_parser(tokenizer.chat_template, "auto", "test")]
    n_calls = 0
    for chat in rows(demo / "agent_demo/chats.jsonl")[:200]:
        text = render_chat(chat["messages"], tokenizer, tools=chat["tools"])
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
        answers = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, flags=re.DOTALL)
        messages = [message for message in chat["messages"] if message["role"] == "assistant"]
        for answer, message in zip(answers, messages, strict=True):
            parsed = parse(answer, chat["tools"] or [])
            calls = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
            assert calls == [call["function"] for call in message.get("tool_calls", [])]
            n_calls += len(calls)
    assert n_calls > 50


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def test_no_held_out_sum_is_trained_on(demo: Path) -> None:
    made = demo / "agent_demo"
    heldout = {numbers(row["input"]) for row in rows(made / "heldout.jsonl")}
    trained = {numbers(row["input"]) for row in rows(made / "sums.jsonl")}
    spoken = {numbers(chat["messages"][0]["content"]) for chat in rows(made / "chats.jsonl")}
    assert (len(heldout), len(trained)) == (40, 320)
    assert heldout & (trained | spoken) == set()
    labels = [
        (sum(numbers(row["input"])), int(row["label"])) for row in rows(made / "heldout.jsonl")
    ]
    assert [pair for pair in labels if pair[0] != pair[1]] == []


def test_the_table_has_wilsons_intervals() -> None:
    """Of Brown, Cai and DasGupta, Interval Estimation for a Binomial Proportion (2001), and of its limits."""
    interval = runpy.run_path(str(REPO / "examples/agent_report.py"))["interval"]
    assert interval(0.9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-3)
    assert interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert interval(1.0, 10)[1] == 1.0
