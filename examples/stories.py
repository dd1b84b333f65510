"""Happy stories: prompts for a small language model trained on TinyStories, and how happy its stories are.

    python examples/stories.py make --out DIR
    python examples/stories.py evaluate --model TRAINED --base UNTOUCHED --prompts DIR/heldout.jsonl

``evaluate`` samples with plain transformers. It prints the mean sentiment of the stories, and how likely the
untouched model finds them: a policy that hacks the reward writes text that the untouched model would never write.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

NAMES = ["Lily", "Tom", "Ben", "Mia", "Sam", "Anna", "Max", "Sue", "Tim", "Lucy"]
ANIMALS = ["dog", "cat", "bird", "bear", "frog", "rabbit", "fish", "duck"]
OPENINGS = [
    "Once upon a time, there was a {animal} named {name}.",
    "One day, {name} saw a {animal} in the park.",
    "{name} had a little {animal}.",
    "There was a small {animal} who liked to play with {name}.",
]
N_HELDOUT = 64


def make(out: Path) -> None:
    """Write train.jsonl and heldout.jsonl, which share no opening."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        text.format(name=n, animal=a) for text, n, a in itertools.product(OPENINGS, NAMES, ANIMALS)
    ]
    random.Random(0).shuffle(rows)
    for name, part in (("heldout", rows[:N_HELDOUT]), ("train", rows[N_HELDOUT:])):
        (out / f"{name}.jsonl").write_text(
            "".join(json.dumps({"input": row}) + "\n" for row in part)
        )


def evaluate(model: str, base: str, prompts: Path, new_tokens: int, seed: int) -> dict[str, object]:
    """Mean sentiment and mean log-prob per token under ``base`` of sampled stories, and the stories."""
    import torch
    from reward_sentiment import reward_fn
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    policy, untouched = (
        AutoModelForCausalLM.from_pretrained(name).eval() for name in (model, base)
    )
    openings = [json.loads(line)["input"] for line in prompts.read_text().splitlines()]
    torch.manual_seed(seed)
    batch = tokenizer(openings, return_tensors="pt", padding=True)
    width = batch["input_ids"].shape[1]
    with torch.no_grad():
        tokens = policy.generate(
            **batch, max_new_tokens=new_tokens, do_sample=True, top_k=0, temperature=1.0
        )
        ended = (tokens[:, width:] == tokenizer.eos_token_id).int().cumsum(-1)
        real = (
            torch.nn.functional.pad(ended, (1, 0))[:, :-1] == 0
        )  # up to and including the first EOS
        mask = torch.cat([batch["attention_mask"].bool(), real], dim=1)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        logits = untouched(tokens, attention_mask=mask.long(), position_ids=positions).logits
        log_probs = logits.log_softmax(-1)[:, width - 1 : -1].gather(-1, tokens[:, width:, None])[
            ..., 0
        ]
    stories = tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
    return {
        "sentiment": sum(reward_fn(openings, stories, [])) / len(stories),
        "base_log_prob": (log_probs * real).sum().item() / real.sum().item(),
        "stories": [
            opening + " | " + story for opening, story in zip(openings, stories, strict=True)
        ],
    }


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument(
        "--out", type=Path, required=True, help="folder to write to"
    )
    command = commands.add_parser("evaluate")
    command.add_argument("--model", required=True, help="trained model")
    command.add_argument("--base", required=True, help="untouched model")
    command.add_argument("--prompts", type=Path, required=True, help="held-out openings")
    command.add_argument("--new_tokens", type=int, default=96)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--show", type=int, default=10, help="stories to print")
    args = parser.parse_args()
    if args.command == "make":
        make(args.out)
        return
    result = evaluate(args.model, args.base, args.prompts, args.new_tokens, args.seed)
    print(f"mean sentiment {result['sentiment']:.3f}")
    print(f"mean log-prob per token under the untouched model {result['base_log_prob']:.3f}")
    for story in result["stories"][: args.show]:
        print("-", " ".join(story.split()))


if __name__ == "__main__":
    main()
