"""The reward, tool, environment and agent files of the pages teach, with the commands that stand below them.

Each file is read from its page. The model is a random Llama of two layers with a token for each word of the game; where
chance alone earns too little, a short supervised training on scripts with little aim precedes.
"""

import json
import random
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.fork_server import REPO

SPECIAL = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = """
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name":"{{ call.function.name }}","arguments":{{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<eos>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SFT = {
    "dataset": "scripts.jsonl",
    "apply_chat_template": "",
    "max_epochs": "8",
    "train_batch_size": "32",
    "micro_train_batch_size": "32",
    "learning_rate": "3e-3",
}
PPO = {
    "init_kl_coef": "0",
    "actor_learning_rate": "1e-3",
    "critic_learning_rate": "3e-3",
    "max_epochs": "2",
    "micro_train_batch_size": "128",
    "micro_rollout_batch_size": "128",
    "max_num_seqs": "256",
    "num_episodes": "1000",
    "save_steps": "100000",
    "engine_check": "off",
    "eval_temperature": "1",
    "eval_n_samples_per_prompt": "16",
    "dump_rollouts": "rollouts",
}
"""What a tiny model needs beside the flags of its page; evaluated as it is trained, at temperature 1."""
Options = dict[str, str]


def blocks(page: str, language: str) -> list[str]:
    """Blocks of a language on a page, in their order."""
    text = (REPO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def file_of(page: str, name: str) -> str:
    """The Python file that a page shows under its name."""
    [block] = [block for block in blocks(page, "python") if block.startswith(f"# {name}\n")]
    return block


def command_of(page: str, mention: str) -> Options:
    """Flags and values of the page's command that has ``mention``."""
    [block] = [block for block in blocks(page, "bash") if mention in block]
    words = shlex.split(block.replace("\\\n", " "))
    flags: Options = {}
    for word in words[words.index("openppo.cli.train_ppo") + 1 :]:
        if word.startswith("--"):
            flag = word.removeprefix("--")
            flags[flag] = ""
        else:
            flags[flag] = f"{flags[flag]} {word}".strip()
    return flags


def words_of(options: Options) -> list[str]:
    """Options as the words of a command line."""
    return [word for flag, value in options.items() for word in (f"--{flag}", *value.split())]


def save_model(folder: Path, words: list[str], seed: int) -> None:
    """A random Llama; each of ``words`` is one token, and so is all text between two of them."""
    tokens = [*SPECIAL, *words]
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    core.add_special_tokens(SPECIAL)
    longest_first = sorted(words, key=len, reverse=True)
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, longest_first))), "isolated"
    )
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **ends, **sizes)).save_pretrained(folder)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@dataclass(frozen=True)
class Case:
    """A file of a page, its command, and a world that is small enough for a tiny model."""

    page: str
    file: str
    mention: str
    """Part of the command."""
    words: list[str]
    options: Options
    rows: list[dict[str, Any]] = field(default_factory=list)
    script: Callable[[random.Random], list[dict[str, Any]]] | None = None
    """Messages to imitate before."""
    right: str = "eval_reward"
    """The metric whose largest value is 1."""
    more: str = ""
    """Code behind that of the page."""
    episodes: int = 12_288


# A model with tools: docs/agents/tools.md.
NUMBERS = range(2)
NAMES = list("abcdefgh")


def call_of(number: int) -> str:
    return f'{{"name":"guess","arguments":{json.dumps({"number": number})}}}'


def calling(number: int, place: int) -> dict[str, Any]:
    """The message that guesses ``number``."""
    function = {"name": "guess", "arguments": {"number": number}}
    call = {"id": f"c{place}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def guessing(rng: random.Random) -> list[dict[str, Any]]:
    """Calls with random numbers while a coin says so, then an answer."""
    secret = rng.choice(NUMBERS)
    messages = [says("user", rng.choice(NAMES))]
    while rng.random() < 0.5 and len(messages) < 15:
        number = rng.choice(NUMBERS)
        messages.append(calling(number, len(messages)))
        messages.append(
            says("tool", "right" if number == secret else "higher" if number < secret else "lower")
        )
    return [*messages, says("assistant", rng.choice(NAMES))]


def guess_row(name: str, secret: int) -> dict[str, Any]:
    extra = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"guess": {"create_kwargs": {"secret": secret}}},
    }
    return {"prompt": [says("user", name)], "extra_info": extra}


GUESS = Case(
    page="docs/agents/tools.md",
    file="guess.py",
    mention="--tools guess.py",
    words=[
        "<tool_call>",
        "</tool_call>",
        *map(call_of, NUMBERS),
        "right",
        "higher",
        "lower",
        *NAMES,
    ],
    rows=[guess_row(name, secret) for name in NAMES for secret in NUMBERS],
    script=guessing,
    options={
        "prompt_data": "rows.jsonl",
        "eval_data": "rows.jsonl",
        "rollout_batch_size": "16",
        "train_batch_size": "64",
        "generate_max_len": "4",
        "episode_max_len": "128",
        "eval_n_samples_per_prompt": "8",
    },
    episodes=4096,
)


def guessing_once(rng: random.Random) -> list[dict[str, Any]]:
    """A call with a random number."""
    return [says("user", rng.choice(NAMES)), calling(rng.choice(NUMBERS), place=1)]


GUESS_AT_ONCE = replace(
    GUESS,
    rows=[guess_row(name, secret=1) for name in NAMES * 2],
    script=guessing_once,
    options=GUESS.options | {"max_turns": "1"},
)
"""The number is always the same, and there is one turn."""


# An environment: docs/agents/environments.md.
SMALL = """

class Small(NumberGame):
    def reset(self, *, seed=None, options=None):
        seen = super().reset(seed=seed)
        self.number %= 3
        return seen
"""
"""The page's game with three numbers instead of ten."""
NUMBER_GAME = Case(
    page="docs/agents/environments.md",
    file="number_game.py",
    mention="number_game.py:NumberGame --n_envs 64",
    words=["higher", "lower", "right", *map(str, range(10))],
    more=SMALL,
    options={"environment": "number_game.py:Small", "n_envs": "32", "generate_max_len": "1"},
)
NUMBER_GAME_BY_GROUP = replace(
    NUMBER_GAME, options=NUMBER_GAME.options | {"advantage_estimator": "group_norm"}
)

FIRST_TURN = '''
class FirstTurn:
    """Pays for "1" at the first of two turns, whatever the second says."""

    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "first", {}

    def step(self, action):
        self.turns += 1
        return "second", float(self.turns == 1 and action == "1"), self.turns == 2, False, {}
'''
FIRST_TURN_PAYS = Case(
    page="docs/agents/environments.md",
    file="number_game.py",
    mention="number_game.py:NumberGame --n_envs 64",
    words=["first", "second", *map(str, range(10))],
    more=FIRST_TURN,
    options={
        "environment": "number_game.py:FirstTurn",
        "n_envs": "32",
        "generate_max_len": "1",
        "advantage_estimator": "group_norm",
    },
)

# Turns that are all rewarded: docs/agents/index.md.
HIGHER = Case(
    page="docs/agents/index.md",
    file="higher.py",
    mention="higher.py:Higher",
    words=[str(number) for number in range(100)],
    options={"generate_max_len": "1", "episode_max_len": "256", "eval_n_envs": "32"},
    episodes=8192,
)


# A coroutine with named rewards: README.md.
TERMS = range(4)


def sum_of(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with the number."


def checked_sum(rng: random.Random) -> list[dict[str, Any]]:
    """Two answers, of which one in two is right, and the others chance."""
    a, b = rng.choices(TERMS, k=2)
    answers = [str(a + b) if rng.random() < 0.5 else str(rng.randrange(7)) for _ in range(2)]
    return [
        says("user", sum_of(a, b)),
        says("assistant", answers[0]),
        says("user", "Check that. Answer with the number only."),
        says("assistant", answers[1]),
    ]


SOLVE = Case(
    page="README.md",
    file="agent.py",
    mention="Instruct --agent agent.py:solve",
    words=[str(number) for number in range(7)],
    rows=[{"input": sum_of(a, b), "label": str(a + b)} for a in TERMS for b in TERMS] * 2,
    script=checked_sum,
    options={
        "eval_data": "sums.jsonl",
        "generate_max_len": "1",
        "episode_max_len": "64",
        "actor_learning_rate": "5e-4",
    },
    right="eval_reward/right",
)
CASES = {
    "guess": GUESS,
    "guess_at_once": GUESS_AT_ONCE,
    "number_game": NUMBER_GAME,
    "number_game_by_group": NUMBER_GAME_BY_GROUP,
    "first_turn_pays": FIRST_TURN_PAYS,
    "higher": HIGHER,
    "solve": SOLVE,
}


def steps_that_teach(folder: Path) -> set[int]:
    """Global steps in which the episodes of some group have different rewards."""
    earned = defaultdict(set)
    for file in folder.glob("train-*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            earned[row["step"], row["group"]].add(round(row["reward"], 6))
    return {step for (step, _), rewards in earned.items() if len(rewards) > 1}


@pytest.fixture
def play(run: Callable[..., str], tmp_path: Path) -> Callable[[Case, int], list[dict[str, float]]]:
    """``play(case, seed)``: metrics of each step of a run of the page's command."""

    def logged(case: Case, seed: int) -> list[dict[str, float]]:
        pretrain = "model"
        save_model(tmp_path / pretrain, case.words, seed)
        (tmp_path / case.file).write_text(file_of(case.page, case.file) + case.more)
        if case.script is not None:
            rng = random.Random(seed)
            write(tmp_path / "scripts.jsonl", [{"messages": case.script(rng)} for _ in range(2048)])
            sft = SFT | {"pretrain": pretrain, "save_path": "sft", "seed": str(seed)}
            run([sys.executable, "-m", "openppo.cli.train_sft", *words_of(sft)], tmp_path)
            pretrain = "sft"

        flags = command_of(case.page, case.mention) | PPO | case.options
        flags |= {"pretrain": pretrain, "save_path": "ppo", "seed": str(seed)}
        if case.rows:
            write(tmp_path / flags["prompt_data"], case.rows)
        samples = int(flags["n_samples_per_prompt"]) * int(
            flags.get("n_envs") or flags["rollout_batch_size"]
        )
        flags["max_steps"] = flags["eval_steps"] = str(case.episodes // samples)
        run([sys.executable, "-m", "openppo.cli.train_ppo", *words_of(flags)], tmp_path)
        lines = (tmp_path / "ppo/logs/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return logged


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_files_of_the_pages_teach_what_they_reward(
    play, tmp_path: Path, name: str, seed: int
) -> None:
    case = CASES[name]
    steps = play(case, seed)
    rewards = [step["reward"] for step in steps]
    teaching = steps_that_teach(tmp_path / "rollouts")
    still = [
        step["step"]
        for step in steps
        if step["step"] in teaching and not step["actor_grad_norm"] > 0
    ]
    right = steps[-1][case.right]
    print(
        f"{name} {seed}: {rewards[0]:.3f} to {rewards[-1]:.3f}, right {right:.3f}, {len(still)} steps without gradient"
    )
    assert teaching
    assert still == []
    assert right >= 0.95
