"""A chat model with tools that a laptop makes in a minute, and tasks on which its agents improve.

    user       "What is 12 + 30? Answer with the number."
    assistant  <tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>
    tool       "42"
    assistant  "42"

`python examples/agent_model.py make --out DIR --seed S` writes everything that examples/scripts/agent.sh needs:

    DIR/random/         a small Llama with random weights, a tokenizer, and a chat template with tools
    DIR/chats.jsonl     {"messages", "tools"}       for supervised fine-tuning
    DIR/sums.jsonl      {"input", "label"}          to train agents that answer sums
    DIR/heldout.jsonl   the same, to evaluate them; none of its sums occurs in another file
    DIR/games.jsonl     {"input", "extra_info"}     to train agents that play the game of examples/tools/guess.py
    DIR/playoffs.jsonl  the same, to evaluate them; each number from 0 to 9 equally often

The chats show how to speak, and not what pays: half of the sums are left to the tool, the others are answered with a
number at random; without a tool half of the answers are right; only a third of the games are played by the hints.
"""

import argparse
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Chat = dict[str, Any]
Pair = tuple[int, int]

N_CHATS = 4000
N_HELDOUT = 40  # sums; each is a run of a program, which takes most of a second
N_GAMES = 1000
N_PLAYOFFS = 200
CALLS = 0.5  # share of the sums with a tool for which the tool is called
HEEDED = 0.33  # share of the games that are played by the hints
SUM = "What is {} + {}?"
BRIEF = " Answer with the number."
DOUBTS = (
    "Check that. Answer with the number only.",
    "Are you sure? Answer with the number only.",
    "That is wrong. Think again.",
    "That is wrong. Try again.",
)
GUESS = "I think of a number from 0 to 9. Find it in four guesses."
GAME = "I think of a number from 0 to 9. Guess it, with one digit, in four guesses."
ABOVE = "Name a number from 0 to 99 above {}."
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CALL_MARKS = ["<tool_call>", "</tool_call>"]
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}Tools:
{%- for tool in tools %}
{%- set function = tool.function %} {{ function.name }}
{{- '(' + function.parameters.properties | join(', ') + '): ' + function.description }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def schema(name: str, description: str, types: dict[str, str]) -> dict[str, Any]:
    """Schema of a tool in OpenAI's form, whose parameters have these types."""
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


ADD = schema("add", "Add two numbers.", {"a": "number", "b": "number"})
GUESS_TOOL = schema("guess", "Guess the number.", {"number": "integer"})


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def answer(text: object) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": str(text)}


def call(name: str, result: object, **arguments: int) -> list[Message]:
    """A call of a tool, and its result."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c00000000", "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": str(result), "tool_call_id": "c00000000"},
    ]


def question(rng: random.Random, pair: Pair) -> Message:
    """Ask a sum in one of two ways."""
    return user(SUM.format(*pair) + rng.choice(["", BRIEF]))


def any_sum(rng: random.Random) -> int:
    """Draw a number that may be a sum."""
    return rng.randint(20, 99)


def sum_with_tool(rng: random.Random, pair: Pair) -> Chat:
    """A sum that the tool adds, or a number at random."""
    a, b = pair
    messages = [question(rng, pair)]
    if rng.random() < CALLS:
        messages += [*call("add", a + b, a=a, b=b), answer(a + b)]
    else:
        messages.append(answer(any_sum(rng)))
    return {"messages": messages, "tools": [ADD]}


def sum_in_mind(rng: random.Random, pair: Pair) -> Chat:
    """A sum without a tool, and in half of the chats a doubt and another answer; half of all answers are right."""
    messages = [question(rng, pair), answer(rng.choice([sum(pair), any_sum(rng)]))]
    if rng.random() < 0.5:
        messages.append(user(rng.choice(DOUBTS)))
        messages.append(answer(rng.choice([sum(pair), any_sum(rng)])))
    return {"messages": messages, "tools": None}


def hint(secret: int, number: int) -> str:
    """Compare a guess with the secret number."""
    if number == secret:
        return "right"
    return "higher" if number < secret else "lower"


def guesses(rng: random.Random) -> tuple[int, list[int]]:
    """A secret number and guesses up to it, four at most: always the middle of what is left, or at random."""
    secret, numbers = rng.randrange(10), []
    heeds = rng.random() < HEEDED
    low, high = 0, 9
    while len(numbers) < 4 and secret not in numbers:
        number = (low + high) // 2 if heeds else rng.randrange(10)
        numbers.append(number)
        if number < secret:
            low = number + 1
        else:
            high = number - 1
    return secret, numbers


def game_with_tool(rng: random.Random) -> Chat:
    """The game of examples/tools/guess.py."""
    secret, numbers = guesses(rng)
    messages = [user(GUESS)]
    for number in numbers:
        messages += call("guess", hint(secret, number), number=number)
    return {"messages": [*messages, answer(numbers[-1])], "tools": [GUESS_TOOL]}


def game_in_words(rng: random.Random) -> Chat:
    """The game of examples/agents/number_game.py."""
    secret, numbers = guesses(rng)
    messages = [user(GAME)]
    for number in numbers:
        messages += [answer(number), user(hint(secret, number))]
    return {"messages": messages[:-1], "tools": None}


def numbers_above(rng: random.Random) -> Chat:
    """Three numbers of two digits, each above or below another one."""
    messages: list[Message] = []
    for _ in range(3):
        messages += [user(ABOVE.format(rng.randrange(90))), answer(rng.randint(10, 99))]
    return {"messages": messages, "tools": None}


def chat(rng: random.Random, pairs: list[Pair]) -> Chat:
    """A chat of one of five kinds; sums are of ``pairs``."""
    pair = rng.choice(pairs)
    kinds = {
        "sum with tool": lambda: sum_with_tool(rng, pair),
        "sum in mind": lambda: sum_in_mind(rng, pair),
        "game with tool": lambda: game_with_tool(rng),
        "game in words": lambda: game_in_words(rng),
        "numbers above": lambda: numbers_above(rng),
    }
    (kind,) = rng.choices(list(kinds), weights=[5, 3, 2, 1, 1])
    return kinds[kind]()


def sum_row(pair: Pair) -> dict[str, str]:
    """A sum to train or evaluate with."""
    return {"input": SUM.format(*pair) + BRIEF, "label": str(sum(pair))}


def game_row(secret: int) -> dict[str, Any]:
    """A game to train or evaluate with: the tool knows the secret, the prompt does not say it."""
    arguments = {"create_kwargs": {"secret": secret}}
    return {"input": GUESS, "extra_info": {"tools_kwargs": {"guess": arguments}}}


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(out: Path, rng: random.Random) -> list[Chat]:
    """Write the five JSON-lines files; return the chats."""
    tens = range(10, 90, 10)
    pairs = [(a, b) for a in range(10, 90) for b in tens if a + b < 100]
    rng.shuffle(pairs)
    heldout = pairs[:N_HELDOUT]
    others = pairs[N_HELDOUT:]

    chats = [chat(rng, others) for _ in range(N_CHATS)]
    write_rows(out / "chats.jsonl", chats)
    write_rows(out / "sums.jsonl", map(sum_row, others))
    write_rows(out / "heldout.jsonl", map(sum_row, heldout))
    write_rows(out / "games.jsonl", [game_row(rng.randrange(10)) for _ in range(N_GAMES)])
    write_rows(out / "playoffs.jsonl", [game_row(i % 10) for i in range(N_PLAYOFFS)])
    return chats


def texts_of(chat: Chat) -> list[str]:
    """Return the texts of a chat, calls as the template writes them."""
    texts = [tool["function"]["description"] for tool in chat["tools"] or []]
    for message in chat["messages"]:
        texts += [message["role"], message["content"]]
        texts += [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
    return texts


def train_tokenizer(chats: list[Chat]) -> Any:
    """Make a byte-level BPE in which a digit, a line break and a mark of the template is a token of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    alone = pre_tokenizers.Split(Regex(r"\d|\n"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([alone, to_bytes])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(map(texts_of, chats), trainer)
    core.add_tokens(CALL_MARKS)
    names = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)


def write_model(out: Path, chats: list[Chat], seed: int) -> None:
    """Write a small Llama with random weights, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no GPU

    tokenizer = train_tokenizer(chats)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_theta": 100.0, "rope_type": "default"},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(out / "random")
    tokenizer.save_pretrained(out / "random")


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make = parser.add_subparsers(dest="command", required=True).add_parser(
        "make", help="write the data and the model"
    )
    make.add_argument("--out", type=Path, required=True, help="the folder to write to")
    make.add_argument(
        "--seed", type=int, default=0, help="seed of the data and of the model's weights"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chats = write_data(args.out, random.Random(args.seed))
    write_model(args.out, chats, args.seed)


if __name__ == "__main__":
    main()
