"""Models, data and user code of all cases, made without openppo: the same for an old and a new commit."""

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

LETTERS = "abcdefgh"
ENDS = ("<pad>", "<eos>", "<unk>")
CALL = '{"name":"ask","arguments":{}}'
CHAT = """
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name":"{{ call.function.name }}","arguments":{{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<eos>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ROLES = ["<user>", "<assistant>", "<system>", "<tool>"]
TALK = [*LETTERS, "\n", " ", "<tool_call>", "</tool_call>", CALL]
REWARD = """
def reward_fn(responses, labels):
    return {"short": [1 - len(each) / 8 for each in responses], "right": [float("a" in each) for each in responses]}


def parity(responses, labels):
    # of every second prompt all responses earn the same
    return [float(label % 2 or len(each) % 2) for each, label in zip(responses, labels)]


def count(responses):
    return [each.count("a") / (1 + len(each)) for each in responses]
"""
GAME = """
import random


class Game:
    def reset(self, *, seed=None, options=None):
        self.dice, self.n = random.Random(seed), 0
        return self.dice.choice("abcdefgh"), {}

    def parse(self, text):
        return text.strip() or None

    def step(self, action):
        self.n += 1
        done = self.n == 3 or "h" in action
        return self.dice.choice("abcdefgh"), action.count("a") / 4, done, False, {}
"""
TOOLS = """
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema


class Ask(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "ask"}})

    async def create(self, instance_id=None, secret=None, **kwargs):
        return "b"

    async def execute(self, instance_id, parameters, **kwargs):
        return "b", 0.25, {}
"""
AGENT = """
import asyncio


async def branches(task, session):
    first = await session.chat(task.messages)
    more = [await session.chat([*first.messages, {"role": "user", "content": text}]) for text in "ab"]
    apart = await session.chat([{"role": "user", "content": "h"}])
    return {"said": float(len(apart.text)), "a": sum(turn.text.count("a") for turn in more) / 4}


async def talk(task, session):
    turn = await session.chat(task.messages)
    return turn.text.count("a") / 4
"""
PROGRAM = """
import json, os, sys, urllib.request


def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(2):
    messages += [chat(messages), {"role": "user", "content": sys.argv[1]}]
print(json.dumps({"reward": sum(len(message["content"]) for message in messages[1::2]) / 8}))
"""
TASKS = """
tasks:
  - {name: letters, data: ../inputs/prompts.jsonl, reward: "../inputs/reward.py:count", ratio: 0.5}
  - {name: talk, agent: "../inputs/agent.py:talk", data: ../inputs/prompts.jsonl, ratio: 0.3, options: {max_turns: 1}}
  - {name: game, ratio: 0.2, options: {environment: "../inputs/game.py:Game"}}
"""
CODE = {
    "reward.py": REWARD,
    "game.py": GAME,
    "tools.py": TOOLS,
    "agent.py": AGENT,
    "program.py": PROGRAM,
    "tasks.yaml": TASKS,
    "alone.yaml": "agent_concurrency: 1\n",
    "judge.yaml": "prm_placeholder_token: h\nprm_reward_tokens: [a, b]\n",
}


def write_inputs(folder: Path) -> None:
    """Fill ``folder`` with everything that cases read."""
    folder.mkdir(parents=True)
    tokenizer = save_tokenizer(folder / "actor", LETTERS)
    torch.manual_seed(7)
    LlamaForCausalLM(llama(tokenizer)).save_pretrained(folder / "actor")
    tokenizer.save_pretrained(folder / "reward")
    LlamaForSequenceClassification(llama(tokenizer, num_labels=1)).save_pretrained(
        folder / "reward"
    )
    chat = save_tokenizer(folder / "chat", TALK, ROLES, CHAT)
    LlamaForCausalLM(llama(chat, max_position_embeddings=512)).save_pretrained(folder / "chat")
    write_caller(folder / "caller")
    write_llava(folder / "llava")
    write_data(folder)
    for name, text in CODE.items():
        (folder / name).write_text(text)


def save_tokenizer(
    folder: Path, tokens: Any, special: Any = (), template: str | None = None
) -> Any:
    """A tokenizer of one token per character, and of the longer ``tokens`` as well."""
    names = [*ENDS, *special, *tokens]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.add_special_tokens([*ENDS, *special])
    core.add_tokens([name for name in tokens if len(name) > 1])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    ends = dict(zip(("pad_token", "eos_token", "unk_token"), ENDS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends, chat_template=template)
    tokenizer.save_pretrained(folder)
    return tokenizer


def llama(tokenizer: Any, **options: int) -> LlamaConfig:
    """Two layers, whose first policy is far from uniform."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    fields: dict[str, Any] = {**sizes, **heads, **ends, **options}
    return LlamaConfig(initializer_range=0.2, vocab_size=len(tokenizer), **fields)


def write_data(folder: Path) -> None:
    """JSON lines of each kind of data, with texts of unequal length."""
    rng = random.Random(7)

    def text(least: int, most: int, letters: str = LETTERS) -> str:
        return "".join(rng.choices(letters, k=rng.randint(least, most)))

    write_rows(folder / "prompts.jsonl", [{"input": text(1, 9), "label": i} for i in range(16)])
    write_rows(folder / "heldout.jsonl", [{"input": text(1, 9), "label": i} for i in range(3)])
    write_rows(folder / "long.jsonl", [{"input": text(40, 48), "label": i} for i in range(6)])
    write_rows(
        folder / "words.jsonl", [{"input": text(1, 4), "label": text(1, 3)} for _ in range(12)]
    )
    (folder / "own").mkdir()
    for name in ("prompts", "heldout"):
        write_rows(
            folder / f"own/{name}.jsonl",
            [{"input": text(1, 4), "label": text(1, 3)} for _ in range(6)],
        )
    write_rows(folder / "documents.jsonl", [{"input": text(1, 24)} for _ in range(8)])
    write_rows(
        folder / "sft.jsonl", [{"input": text(1, 9), "output": text(1, 9)} for _ in range(12)]
    )
    steps = [
        {"input": f"{text(1, 3, 'cd')}h{text(1, 3, 'efg')}h", "labels": rng.choices("ab", k=2)}
        for _ in range(12)
    ]
    write_rows(folder / "steps.jsonl", steps)
    pairs = [
        {"prompt": text(1, 5), "chosen": text(2, 9, "aab"), "rejected": text(2, 9, "bcd")}
        for _ in range(12)
    ]
    write_rows(folder / "preference.jsonl", pairs)


def write_caller(folder: Path) -> None:
    """A model that mostly calls a tool: what it says next depends on the last token alone."""
    tokenizer = save_tokenizer(folder, TALK, ROLES, CHAT)
    torch.manual_seed(9)
    model = LlamaForCausalLM(llama(tokenizer, max_position_embeddings=512))
    call = tokenizer.convert_tokens_to_ids(
        ["<assistant>", "<tool_call>", CALL, "</tool_call>", "<eos>"]
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        model.model.embed_tokens.weight.add_(
            torch.eye(len(tokenizer), model.config.hidden_size), alpha=4
        )
        for last, following in pairwise(call):
            model.lm_head.weight[following, last] += 1.0
    model.save_pretrained(folder)


def write_llava(folder: Path) -> None:
    """A model that reads images, its processor, and prompts with one, no and two images."""
    rng = random.Random(9)
    tokenizer = save_tokenizer(folder, LETTERS, ["<image>", *ROLES], CHAT)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    image = {"image_token": "<image>", "num_additional_image_tokens": 1}
    LlavaProcessor(
        CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **image
    ).save_pretrained(folder)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama(tokenizer),
        vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **ends,
    )
    torch.manual_seed(8)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    rows: list[dict[str, object]] = []
    for i in range(8):
        names = [f"{i}-{k}.png" for k in range((1, 0, 2)[i % 3])]
        for name in names:
            Image.frombytes("RGB", (20, 16), rng.randbytes(20 * 16 * 3)).save(folder / name)
        rows.append(
            {
                "input": "<image>" * len(names) + "".join(rng.choices(LETTERS, k=12 + i % 5)),
                "images": names,
            }
        )
    write_rows(folder / "images.jsonl", rows)


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def checksum(folder: Path) -> str:
    """One number for all that is in ``folder``."""
    digest = hashlib.sha256()
    for file in sorted(
        each for each in folder.rglob("*") if each.is_file() and "__pycache__" not in each.parts
    ):
        digest.update(f"{file.relative_to(folder)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
