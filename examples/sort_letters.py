"""A task small enough for a laptop: write the letters of a word in alphabetical order.

    prompt  "dbgda>"   right answer  "abddg"

`python examples/sort_letters.py make --out DIR --seed S` writes everything that the three stages of RLHF need:

    DIR/model/                     a small Llama with random weights, and a tokenizer with one token per character
    DIR/sft.jsonl                  {"input", "output"}               for supervised fine-tuning
    DIR/preference.jsonl           {"prompt", "chosen", "rejected"}  for the reward model
    DIR/preference_heldout.jsonl   the same, to measure the reward model
    DIR/prompts.jsonl              {"input", "label"}                for PPO
    DIR/heldout.jsonl              {"input", "label"}                to measure the policy

`python examples/sort_letters.py student --out DIR --seed S` writes DIR/model alone, a fifth as large.

No prompt of a held-out file appears in another file. Whether an answer is right is decided by Python's sorted()
(`is_correct`), never by a model, so the measured accuracy is independent of the learned reward.
"""

import argparse
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

ALPHABET = "abcdefgh"
LENGTH = 5  # letters in a prompt; a letter may occur more than once
STRAY = (">", "<pad>", "<bos>", "<unk>")  # tokens that stand in no answer
SIZES = {
    "heldout": 500,
    "preference_heldout": 1000,
    "sft": 2400,
    "preference": 40000,
    "prompts": 24576,
}


def correct_answer(prompt: str) -> str:
    """Return the letters to sort, in alphabetical order: "cab>" gives "abc"."""
    return "".join(sorted(prompt.removesuffix(">")))


def is_correct(prompt: str, answer: str) -> bool:
    """Tell whether the answer is exactly the sorted letters of the prompt (surrounding blanks aside)."""
    return answer.strip() == correct_answer(prompt)


def exact_match(prompts: Iterable[str], answers: Iterable[str]) -> float:
    """Return the share of right answers, between 0 and 1."""
    marks = [is_correct(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return sum(marks) / len(marks)


def sample_prompt(rng: random.Random) -> str:
    """Draw one prompt."""
    return "".join(rng.choices(ALPHABET, k=LENGTH)) + ">"


def damage(letters: list[str], rng: random.Random) -> list[str]:
    """Make one mistake: replace, drop or add a letter, swap two, put in a stray token, or ramble on."""
    letters = letters or [rng.choice(ALPHABET)]
    i, j = rng.randrange(len(letters)), rng.randrange(len(letters))
    kind = rng.choice([*["replace"] * 5, "drop", "add", "swap", "stray", *["ramble"] * 2])
    if kind == "swap":
        letters[i], letters[j] = letters[j], letters[i]
    elif kind == "stray":
        letters[i : i + rng.randrange(2)] = [rng.choice(STRAY)]  # beside a letter or in its place
    elif kind == "ramble":
        said = letters[: rng.randrange(LENGTH + 1)]
        more = rng.choice(
            [letters, letters[i : i + 1], [*ALPHABET, *STRAY]]
        )  # any of them, or one again and again
        letters = said + rng.choices(more, k=rng.randint(LENGTH + 1, 16) - len(said))
    else:  # the order is kept, as in most mistakes of a half-trained model
        letters[i : i + (kind != "add")] = (
            [] if kind == "drop" else [rng.choice([*ALPHABET, *letters])]
        )
        letters.sort()
    return letters


def wrong_answer(prompt: str, rng: random.Random) -> str:
    """Return an answer with one mistake or, less often, two or three.

    All that a policy may write is among them: what a reward model has never seen may please it by chance, and PPO
    finds that.
    """
    answer = correct_answer(prompt)
    letters = list(answer)
    while "".join(letters) == answer:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            letters = damage(letters, rng)
    return "".join(letters)


def write_data(out: Path, rng: random.Random) -> None:
    """Write the five JSON-lines files; a held-out prompt occurs once only, in one file only."""
    heldout: set[str] = set()
    for name, size in SIZES.items():  # held-out files first
        rows = []
        while len(rows) < size:
            prompt = sample_prompt(rng)
            if prompt in heldout:
                continue
            if name.endswith("heldout"):
                heldout.add(prompt)
            answer = correct_answer(prompt)
            if name == "sft":
                rows.append({"input": prompt, "output": answer})
            elif name.startswith("preference"):
                rows.append(
                    {"prompt": prompt, "chosen": answer, "rejected": wrong_answer(prompt, rng)}
                )
            else:
                rows.append({"input": prompt, "label": answer})
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(out: Path, seed: int, hidden_size: int = 96, layers: int = 3) -> None:
    """Write a small Llama with random weights and a tokenizer whose tokens are single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # or DeepSpeed, if installed, warns that it found no GPU

    vocab = {
        token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", ">", *ALPHABET])
    }
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    characters.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make", help="write the data and the model")
    commands.add_parser("student", help="write a smaller model, and no data")
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, required=True, help="the folder to write to")
        command.add_argument(
            "--seed", type=int, default=0, help="seed of the data and of the model's weights"
        )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command == "student":
        write_model(args.out, args.seed, hidden_size=48, layers=2)
        return
    write_data(args.out, random.Random(args.seed))
    write_model(args.out, args.seed)


if __name__ == "__main__":
    main()
