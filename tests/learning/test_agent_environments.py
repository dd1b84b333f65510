"""Environments are learned: the number of guesses it takes to find a number, and lakes from maps as text."""

import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import save_tokenizer
from tests.fork_server import REPO

TEMPLATE = """{% for m in messages -%}
{% if m.role == 'assistant' %}>{{ m.content }}<eos>{% else %}{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}>{% endif %}"""
PPO = """train_ppo --generate_max_len 1 --micro_rollout_batch_size 128 --micro_train_batch_size 64
    --train_batch_size 64 --max_num_seqs 256 --save_steps 100000 --gamma 0.95"""
"""One token is an action, so an answer needs no end."""
Train = Callable[[str], list[dict[str, Any]]]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path, characters: str, seed: int, width: int, **sizes: Any) -> None:
    """A random Llama of two layers whose tokens are ``characters``."""
    tokenizer = save_tokenizer(folder, characters, ["<sep>"], chat_template=TEMPLATE)
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    small = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **small | sizes, **ends)
    ).save_pretrained(folder)


@pytest.fixture
def train(run: Callable[..., str], tmp_path: Path) -> Train:
    """``train(command)``: the metrics of a command in the test's folder, which writes to ``out`` unless it says."""

    def logged(command: str) -> list[dict[str, Any]]:
        name, *words = (
            f"{command} --engine_check off".split() if "train_ppo" in command else command.split()
        )
        if "--save_path" not in words:
            words += ["--save_path", "out"]
        run([sys.executable, "-m", f"openppo.cli.{name}", *words], tmp_path)
        out = tmp_path / words[words.index("--save_path") + 1]
        return [
            json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()
        ]

    return logged


GUESS = f"""
import sys
sys.path.insert(0, {str(REPO / "examples/agents")!r})
from number_game import NumberGame
class Game(NumberGame):
    unreadable = "?"
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number %= 3
        return "?", {{}}
    def step(self, action):
        answer, *rest = super().step(action)
        rest[2] = self.guesses == 2
        return answer[0], *rest
"""
"""A number from 0 to 2 in two guesses: higher and lower say which the second one is, if the first is 1."""


@pytest.mark.parametrize("estimator", ["gae", "rloo --dynamic_sampling 2"])
def test_a_model_learns_to_use_what_its_environment_says(
    train: Train, tmp_path: Path, estimator: str
) -> None:
    make_model(tmp_path / "model", "012hlr?>", seed=1, width=32)
    (tmp_path / "game.py").write_text(GUESS)
    lines = train(
        f"""{PPO} --pretrain model --environment game.py:Game --n_envs 32 --n_samples_per_prompt 4 --max_steps 56
        --episode_max_len 40 --max_turns 4 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3 --max_epochs 2
        --init_kl_coef 0 --eval_n_envs 32 --num_episodes 2 --advantage_estimator {estimator}"""
    )
    assert [line["step"] for line in lines if "eval_reward" in line] == [
        28,
        56,
    ]  # seeds have no passes: shares of steps
    rewards = [line.get("sampled_reward", line["reward"]) for line in lines]
    assert fmean(rewards[:2]) < 0.3
    assert lines[-1]["eval_reward"] > 0.9
    assert (
        lines[-1]["eval_reward_max"] == 1
        and lines[-1]["eval_reward_min"] <= lines[-1]["eval_reward"]
    )


STEPS = {"Lake": 40, "Blind": 24}
"""Of 256 episodes each: 6,144 in all."""
LAKE = f"""
import sys
sys.path.insert(0, {str(REPO / "examples/agents")!r})
from frozen_lake import FrozenLake
class Lake(FrozenLake):
    rules, unreadable = "", "?"
    def shown(self, place):
        return super().shown(place).replace("\\n", "")
class Blind(Lake):
    def shown(self, place):
        return "F" * 16
"""
TRAINED, HELD_OUT, OF_WALKS = 200, 10_000, 20_000
"""First of the 32 maps that are trained on, of 32 others, and of the 2,000 of the walks. No fixed sequence of moves
solves more than 0.375 of the first (beam search over sequences of 20)."""


def write_walks(file: Path) -> None:
    """Up to eight random moves that avoid holes, from a random place on each map: how to move, not where to go."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    rng, rows = random.Random(0), []
    for number in range(2000):
        tiles = "".join(generate_random_map(size=4, seed=OF_WALKS + number))
        place, messages = rng.choice([i for i, tile in enumerate(tiles) if tile in "SF"]), []
        while len(messages) < 16 and tiles[place] != "G":
            row, column = divmod(place, 4)
            inside = {
                "L": (column > 0, -1),
                "D": (row < 3, 4),
                "R": (column < 3, 1),
                "U": (row > 0, -4),
            }
            moves = [
                (move, by)
                for move, (is_inside, by) in inside.items()
                if is_inside and tiles[place + by] != "H"
            ]
            if not moves:  # holes all around
                break
            move, by = rng.choice(moves)
            messages.append({"role": "user", "content": tiles[:place] + "P" + tiles[place + 1 :]})
            messages.append({"role": "assistant", "content": move})
            place += by
        if messages:
            rows.append({"messages": messages})
    write_rows(file, rows)


@pytest.fixture(scope="module")
def walker(
    run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """``walker(seed)``: a model that has learned the random walks, made once for all tests of a seed."""

    @cache
    def trained(seed: int) -> Path:
        folder = tmp_path_factory.mktemp(f"walker{seed}")
        sizes = {
            "initializer_range": 0.1,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        }
        make_model(folder / "model", "SFHGPLDRU>?", seed, width=64, **sizes)
        write_walks(folder / "walks.jsonl")
        command = """train_sft --pretrain model --dataset walks.jsonl --apply_chat_template --train_batch_size 16
            --micro_train_batch_size 16 --max_epochs 4 --learning_rate 3e-3 --save_path warm"""
        run([sys.executable, "-m", *f"openppo.cli.{command}".split()], folder)
        return folder / "warm"

    return trained


# What the walker sees decides. One that stays on the map but does not see holes crosses as many lakes at first, but has
# to learn of holes by falling in: with GRPO it stood at 0.78 after 50 steps.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("game", "estimator"), [("Lake", "gae"), ("Lake", "group_norm"), ("Blind", "gae")]
)
def test_a_model_learns_to_cross_lakes_that_it_sees(
    train: Train,
    walker: Callable[[int], Path],
    tmp_path: Path,
    game: str,
    estimator: str,
    seed: int,
) -> None:
    (tmp_path / "lake.py").write_text(LAKE)
    for name, first in (("trained", TRAINED), ("heldout", HELD_OUT)):
        write_rows(tmp_path / f"{name}.jsonl", [{"map": first + i} for i in range(32)])
    steps = STEPS[game]
    lines = train(
        f"""{PPO} --pretrain {walker(seed)} --environment lake.py:{game} --prompt_data trained.jsonl
        --eval_data trained.jsonl,heldout.jsonl --rollout_batch_size 32 --n_samples_per_prompt 8 --seed {seed}
        --episode_max_len 260 --max_turns 12 --max_epochs 2 --init_kl_coef 0.03 --num_episodes {steps}
        --actor_learning_rate 1e-3 --critic_learning_rate 2e-3 --eval_steps {steps} --advantage_estimator {estimator}"""
    )
    first, last = lines[0]["reward"], lines[-1]
    trained, held_out = (last[f"eval/{name}.jsonl/reward"] for name in ("trained", "heldout"))
    print(
        f"{game} {estimator} seed {seed}: {first:.2f} at first, trained {trained:.2f}, held out {held_out:.2f}"
    )
    assert (first < 0.1 and trained >= 0.9) if game == "Lake" else trained < 0.5
