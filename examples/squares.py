"""A task with pictures, small enough for a laptop: say how many squares there are, and of which colour.

    prompt  "<image> squares ?" and a picture of 32 x 32 pixels     right answer  "3 blue"

`python examples/squares.py make --out DIR --seed S` writes:

    DIR/model/            a small LLaVA with random weights: a CLIP tower that reads pictures, a Llama that writes words
    DIR/images/           the pictures
    DIR/sft.jsonl         {"input", "images", "output"}, for supervised fine-tuning
    DIR/prompts.jsonl     the same, for PPO
    DIR/heldout.jsonl     the same, to measure the policy: its pictures are in no other file
    DIR/shuffled.jsonl    the same, each with the picture of another row: whoever looks at pictures is at chance here

`reward_fn` is what PPO learns from: half a point for the number, half for the colour.
"""

import argparse
import json
import os
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (255, 40, 40), "green": (40, 220, 40), "blue": (60, 60, 255)}
NUMBERS = ("1", "2", "3")
PROMPT = "<image> squares ?"
PIXELS, PATCH, SQUARE = 32, 8, 6
SIZES = {"heldout": 300, "sft": 3000, "prompts": 2400}


def reward_fn(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """Half a point for the right number and half for the right colour of each response."""
    return [score(response, label) for response, label in zip(responses, labels, strict=True)]


def score(answer: str, label: str) -> float:
    """Share of the two words that are right; 0 for an answer of more words, or fewer."""
    said, right = answer.split(), label.split()
    return sum(a == b for a, b in zip(said, right, strict=True)) / 2 if len(said) == 2 else 0.0


def draw(number: int, colour: str, rng: random.Random) -> Image.Image:
    """A dark picture with so many squares, none of them touching another."""
    image = Image.new("RGB", (PIXELS, PIXELS), tuple(rng.randrange(30) for _ in range(3)))
    cells = [(x, y) for x in range(0, PIXELS, PATCH) for y in range(0, PIXELS, PATCH)]
    for x, y in rng.sample(cells, number):
        left, top = x + rng.randrange(PATCH - SQUARE), y + rng.randrange(PATCH - SQUARE)
        ImageDraw.Draw(image).rectangle(
            (left, top, left + SQUARE - 1, top + SQUARE - 1), COLOURS[colour]
        )
    return image


def write_data(out: Path, rng: random.Random) -> None:
    """Write pictures and rows; no two pictures are alike."""
    (out / "images").mkdir(exist_ok=True)
    seen: set[bytes] = set()
    for name, size in SIZES.items():
        rows = []
        while len(rows) < size:
            number, colour = rng.choice(NUMBERS), rng.choice([*COLOURS])
            image = draw(int(number), colour, rng)
            if image.tobytes() in seen:
                continue
            seen.add(image.tobytes())
            path = f"images/{name}-{len(rows)}.png"
            image.save(out / path)
            rows.append({"input": PROMPT, "images": [path], "output": f"{number} {colour}"})
        write_rows(out / f"{name}.jsonl", rows)
        if name == "heldout":
            others = [row["images"] for row in rows[1:] + rows[:1]]
            shuffled = [{**row, "images": images} for row, images in zip(rows, others, strict=True)]
            write_rows(out / "shuffled.jsonl", shuffled)


def write_rows(file: Path, rows: list[dict]) -> None:
    """Write lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(out: Path, seed: int) -> None:
    """Write a small LLaVA with random weights, and its processor, whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        logging,
    )

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # or DeepSpeed, if installed, warns that it found no GPU

    names = ["<pad>", "<eos>", "<unk>", "<image>", "squares", "?", *NUMBERS, *COLOURS]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=["<image>"], **special
    )
    sides = {"shortest_edge": PIXELS}
    pictures = CLIPImageProcessorPil(size=sides, crop_size={"height": PIXELS, "width": PIXELS})
    processor = LlavaProcessor(
        pictures, tokenizer, PATCH, "default", image_token="<image>", num_additional_image_tokens=1
    )
    width = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=PIXELS, patch_size=PATCH, **width),
        text_config=LlamaConfig(vocab_size=len(names), max_position_embeddings=64, **width, **ids),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        **ids,
    )
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(config).save_pretrained(out / "model")
    processor.save_pretrained(out / "model")


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
    write_data(args.out, random.Random(args.seed))
    write_model(args.out, args.seed)


if __name__ == "__main__":
    main()
