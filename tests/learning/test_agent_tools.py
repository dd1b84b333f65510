"""A model learns to call a tool and to answer with what it says, within 3,840 episodes."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
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
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema

class Ask(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "ask"}})

    async def create(self, instance_id=None, secret=None, **kwargs):
        return SECRET

    async def execute(self, instance_id, parameters, **kwargs):
        return instance_id
"""
PPO = """--pretrain sft --save_path ppo --tools tools.py --tool_parser hermes --apply_chat_template
    --prompt_data rows.jsonl --verifiable_reward exact_match --max_turns 3 --generate_max_len 8 --episode_max_len 48
    --rollout_batch_size 64 --train_batch_size 64 --micro_train_batch_size 64 --micro_rollout_batch_size 64
    --num_episodes 100 --max_steps 100 --actor_learning_rate 3e-3 --init_kl_coef 0"""
CRITIC = "--critic_learning_rate 3e-3"
GRPO = "--advantage_estimator group_norm --n_samples_per_prompt 8 --rollout_batch_size 8"


def save_model(folder: Path, seed: int) -> None:
    """A random Llama of two layers; a call's JSON is one token, and so is a letter."""
    tokens = [*SPECIAL, "<tool_call>", "</tool_call>", CALL, *LETTERS]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.add_special_tokens(SPECIAL)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?tool_call>|\{.*?\{\}\}|[a-h]"), "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokens), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
    ).save_pretrained(folder)


def script(rng: random.Random) -> dict[str, Any]:
    """An episode with little aim: half of them ask, and of these three in ten answer with what they heard."""
    said, secret, answer = rng.choices(LETTERS, k=3)
    asks, hears = rng.random() < 0.5, rng.random() < 0.35
    call = {"id": "c1", "type": "function", "function": {"name": "ask", "arguments": {}}}
    asked = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": secret}]
    turns, answer = (asked, secret if hears else answer) if asks else ([], answer)
    return {"messages": [{"role": "user", "content": said}, *turns, {"role": "assistant", "content": answer}]}


def row(rng: random.Random, index: int) -> dict[str, Any]:
    """A row of verl: the tool knows what the prompt does not say."""
    said, secret = rng.choices(LETTERS, k=2)
    extra = {"index": index, "need_tools_kwargs": True, "tools_kwargs": {"ask": {"create_kwargs": {"secret": secret}}}}
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
    """``play(flags, seed, secret)``: metrics of each step; the tool says ``secret``, an expression."""

    def logged(flags: str, seed: int, secret: str = "secret") -> list[dict[str, float]]:
        rng = random.Random(seed)
        save_model(tmp_path / "model", seed)
        write(tmp_path / "scripts.jsonl", [script(rng) for _ in range(2048)])
        write(tmp_path / "rows.jsonl", [row(rng, i) for i in range(256)])
        (tmp_path / "tools.py").write_text(TOOL.replace("SECRET", secret))
        sft = """train_sft --pretrain model --dataset scripts.jsonl --apply_chat_template --save_path sft
            --max_epochs 10 --train_batch_size 32 --micro_train_batch_size 32 --learning_rate 3e-3"""
        for command in (sft, f"train_ppo {PPO} {flags} --seed {seed}"):
            name, *words = command.split()
            run([sys.executable, "-m", f"openppo.cli.{name}", *words], tmp_path)
        return [json.loads(line) for line in (tmp_path / "ppo/logs/metrics.jsonl").read_text().splitlines()]

    return logged


SEEDS = [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("flags", [CRITIC, GRPO], ids=["critic", "grpo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_learns_to_ask_a_tool_and_to_say_what_it_said(play, flags: str, seed: int) -> None:
    lines = play(flags, seed)
    assert len(lines) == 60
    assert fmean(line["reward"] for line in lines[:2]) <= 0.3
    assert fmean(line["reward"] for line in lines[-5:]) >= 0.9
    assert fmean(line["agent/tool_calls"] for line in lines[-5:]) >= 0.9
    assert all(line["agent/rerendered_turns"] == 0 for line in lines)


@pytest.mark.parametrize("flags", [CRITIC, GRPO], ids=["critic", "grpo"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)])
def test_a_tool_that_says_nothing_leaves_it_at_chance(play, flags: str, seed: int) -> None:
    lines = play(flags, seed, "'a'")
    assert fmean(line["reward"] for line in lines[-5:]) < 0.3  # an eighth, and what is luck
