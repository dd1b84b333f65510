"""A model learns within 12,288 episodes to ask a tool and to answer with what it says: a game of two turns."""

import json
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
CALL = '{"name":"ask","arguments":{}}'
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = """
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name":"{{ call.function.name }}","arguments":{{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<eos>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOL = """
import asyncio
import random

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema

class Ask(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "ask"}})

    async def create(self, instance_id=None, secret=None, **kwargs):
        return SECRET

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(random.lognormvariate(0, 1) * WAIT)
        return instance_id
"""
STEPS = 192
"""Of 128 episodes each: 12,288 in all."""
SFT = """train_sft --pretrain model --dataset scripts.jsonl --apply_chat_template --save_path sft --max_epochs 12
    --train_batch_size 32 --micro_train_batch_size 32 --learning_rate 3e-3"""
PPO = f"""train_ppo --pretrain sft --save_path ppo --tools tools.py --tool_parser hermes --apply_chat_template
    --prompt_data rows.jsonl --verifiable_reward exact_match --max_turns 2 --generate_max_len 4 --episode_max_len 48
    --train_batch_size 128 --micro_train_batch_size 128 --micro_rollout_batch_size 128 --max_num_seqs 256
    --num_episodes 1000 --max_steps {STEPS} --max_epochs 2 --actor_learning_rate 1e-3 --init_kl_coef 0
    --save_steps 100000 --engine_check off --eval_data rows.jsonl --eval_before_training --eval_steps {STEPS}
    --eval_temperature 1 --eval_n_samples_per_prompt 16"""
"""Evaluated as it is trained, at temperature 1, on 16 episodes of each of the 64 games that there are."""
ESTIMATORS = {
    "gae": """--advantage_estimator gae --lambd 1 --critic_learning_rate 3e-3 --value_pretrain_steps 4
        --rollout_batch_size 128""",
    "group_norm": "--advantage_estimator group_norm --rollout_batch_size 16 --n_samples_per_prompt 8",
}


def save_model(folder: Path, seed: int) -> None:
    """A random Llama of two layers; a call's JSON is one token, and so is a letter."""
    tokens = [*SPECIAL, "<tool_call>", "</tool_call>", CALL, *LETTERS]
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    core.add_special_tokens(SPECIAL)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?tool_call>|\{.*?\{\}\}|[a-h]"), "isolated")
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
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes
        )
    ).save_pretrained(folder)


def script(rng: random.Random) -> dict[str, Any]:
    """An episode with little aim: a quarter of them ask, and of these half answer with what they hear."""
    said, secret, answer = rng.choices(LETTERS, k=3)
    asks, hears = rng.random() < 0.25, rng.random() < 0.5
    call = {"id": "c1", "type": "function", "function": {"name": "ask", "arguments": {}}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": secret},
    ]
    turns, answer = (asked, secret if hears else answer) if asks else ([], answer)
    return {
        "messages": [
            {"role": "user", "content": said},
            *turns,
            {"role": "assistant", "content": answer},
        ]
    }


def row(index: int, said: str, secret: str) -> dict[str, Any]:
    """A row of verl: the tool knows what the prompt does not say."""
    extra = {
        "index": index,
        "need_tools_kwargs": True,
        "tools_kwargs": {"ask": {"create_kwargs": {"secret": secret}}},
    }
    return {
        "data_source": "game",
        "prompt": [{"role": "user", "content": said}],
        "reward_model": {"style": "rule", "ground_truth": secret},
        "extra_info": extra,
    }


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.fixture
def play(run: Callable[..., str], tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """``play(estimator, seed)``: metrics of each step; the tool says ``secret``, an expression, after ``wait`` s."""

    def logged(
        estimator: str, seed: int, secret: str = "secret", wait: float = 0.0, more: str = ""
    ) -> list[dict[str, float]]:
        rng = random.Random(seed)
        save_model(tmp_path / "model", seed)
        write(tmp_path / "scripts.jsonl", [script(rng) for _ in range(4096)])
        write(
            tmp_path / "rows.jsonl",
            [row(i, *pair) for i, pair in enumerate(product(LETTERS, repeat=2))],
        )
        (tmp_path / "tools.py").write_text(
            TOOL.replace("SECRET", secret).replace("WAIT", str(wait))
        )
        for command in (SFT, f"{PPO} {ESTIMATORS[estimator]} --seed {seed} {more}"):
            run([sys.executable, "-m", *f"openppo.cli.{command}".split()], tmp_path)
        return [
            json.loads(line)
            for line in (tmp_path / "ppo/logs/metrics.jsonl").read_text().splitlines()
        ]

    return logged


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_model_learns_to_ask_a_tool_and_repeat_its_answer(
    play, estimator: str, seed: int
) -> None:
    before, *steps = play(estimator, seed)
    calls = fmean(step["agent/tool_calls"] for step in steps[-10:])
    print(
        f"{estimator} {seed}: {before['eval_reward']:.3f} to {steps[-1]['eval_reward']:.3f}, {calls:.3f} calls"
    )
    assert len(steps) == STEPS
    assert before["eval_reward"] <= 0.3
    assert steps[-1]["eval_reward"] >= 0.9
    assert calls >= 0.9
    assert all(step["agent/rerendered_turns"] == 0 for step in steps)


# Each prompt has each secret once, so all policies that answer with a letter are right in an eighth of the games.
@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_tool_that_always_says_a_leaves_it_at_chance(play, estimator: str) -> None:
    before, *_, last = play(estimator, 1, "'a'")
    print(f"{estimator}: {before['eval_reward']:.3f} to {last['eval_reward']:.3f}")
    assert abs(last["eval_reward"] - 1 / 8) < 0.05


# E2: at equal numbers of episodes; that of the synchronous runs is 0.9 and more.
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["decoupled", "double_sided"])
def test_samples_of_older_weights_teach_as_much(play, loss: str) -> None:
    """The median of three seeds: which episodes end first is chance, and without a KL a policy may forget again."""
    rewards = []
    for seed in (1, 2, 3):
        before, *steps = play(
            "group_norm", seed, wait=0.02, more=f"--max_staleness 2 --policy_loss_type {loss}"
        )
        oldest = max(step["staleness_max"] for step in steps)
        rewards.append(steps[-1]["eval_reward"])
        print(f"{loss} {seed}: {before['eval_reward']:.3f} to {rewards[-1]:.3f}, oldest {oldest:g}")
        assert len(steps) == STEPS
        assert 0 < oldest <= 2
    assert median(rewards) >= 0.94
