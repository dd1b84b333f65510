"""The table at the end of the quickstart: what PPO changed, measured without the training code.

Exact match is decided by the task itself; answers are decoded greedily with plain transformers. KL is that of the
trained policy from the SFT model, per sampled answer.

    python examples/quickstart_report.py --run DIR
"""

import argparse
import json
from pathlib import Path

import torch
from sort_letters import is_correct
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)

NEW_TOKENS = 16
BARS = "▁▂▃▄▅▆▇█"
N_SHOWN = 8


def respond(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], greedy: bool
) -> dict:
    """Answers as text, with tokens (B, L), and the masks of real tokens and of answer tokens."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    width = batch["input_ids"].shape[1]
    tokens = model.generate(
        **batch, max_new_tokens=NEW_TOKENS, do_sample=not greedy, **({} if greedy else {"top_k": 0})
    )
    ended = (tokens[:, width:] == tokenizer.eos_token_id).int().cumsum(-1)
    answered = (
        torch.nn.functional.pad(ended, (1, 0))[:, :-1] == 0
    )  # up to and including the first EOS
    real = torch.cat([batch["attention_mask"].bool(), answered], dim=1)
    before_eos = answered & (tokens[:, width:] != tokenizer.eos_token_id)
    rows = zip(tokens[:, width:], before_eos, strict=True)
    answers = [
        tokenizer.decode(row[shown]) for row, shown in rows
    ]  # other special tokens are mistakes
    return {
        "answers": answers,
        "tokens": tokens,
        "real": real,
        "width": width,
        "answered": answered,
    }


def log_probs(model: PreTrainedModel, sample: dict) -> torch.Tensor:
    """Log-probs (B, answer tokens) of a sample under ``model``, 0 after the end."""
    positions = (sample["real"].long().cumsum(-1) - 1).clamp(min=0)
    logits = model(
        sample["tokens"], attention_mask=sample["real"].long(), position_ids=positions
    ).logits
    width = sample["width"]
    chosen = logits.log_softmax(-1)[:, width - 1 : -1].gather(
        -1, sample["tokens"][:, width:, None]
    )[..., 0]
    return chosen * sample["answered"]


def mean_reward(reward: PreTrainedModel, sample: dict) -> float:
    """Mean score of the reward model, row by row so that no padding has to be told apart."""
    rows = zip(sample["tokens"], sample["real"], strict=True)
    return sum(reward(tokens[real][None]).logits.item() for tokens, real in rows) / len(
        sample["tokens"]
    )


@torch.no_grad()
def compare(run: Path) -> tuple[list[dict[str, float]], list[dict], list[str]]:
    """Figures and greedy answers of the SFT model and of the PPO model, and the held-out prompts."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(run / "sft", padding_side="left")
    before, after = (
        AutoModelForCausalLM.from_pretrained(run / name).eval() for name in ("sft", "ppo")
    )
    reward = AutoModelForSequenceClassification.from_pretrained(run / "rm").eval()
    prompts = [
        json.loads(line)["input"]
        for line in (run / "data" / "heldout.jsonl").read_text().splitlines()
    ]
    figures, greedy_answers = [], []
    for model in (before, after):
        greedy = respond(model, tokenizer, prompts, greedy=True)
        sampled = respond(model, tokenizer, prompts, greedy=False)
        right = [
            is_correct(prompt, answer)
            for prompt, answer in zip(prompts, greedy["answers"], strict=True)
        ]
        kl = (log_probs(model, sampled) - log_probs(before, sampled)).sum(-1).mean().item()
        accuracy = 100 * sum(right) / len(right)
        figures.append(
            {"exact match": accuracy, "reward": mean_reward(reward, sampled), "kl": kl + 0.0}
        )
        greedy_answers.append({"answers": greedy["answers"], "right": right})
    return figures, greedy_answers, prompts


def sparkline(values: list[float]) -> str:
    """A curve in one line of text."""
    low, high = min(values), max(values)
    return "".join(
        BARS[int((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in values
    )


def main() -> None:
    """Print the table and keep it as report.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a quickstart run")
    run = parser.parse_args().run
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    (before, after), (first, second), prompts = compare(run)
    logged = [
        json.loads(line)
        for line in (run / "ppo" / "logs" / "metrics.jsonl").read_text().splitlines()
    ]
    logged = [row for row in logged if "reward" in row]  # not the evaluation before training

    print(f"\n{'held-out prompts: ' + str(len(prompts)):<34}{'before PPO':>12}{'after PPO':>12}")
    print(
        f"{'exact match (greedy), %':<34}{before['exact match']:>12.1f}{after['exact match']:>12.1f}"
    )
    print(f"{'mean reward (sampled)':<34}{before['reward']:>12.2f}{after['reward']:>12.2f}")
    print(f"{'KL from SFT per answer, nats':<34}{before['kl']:>12.2f}{after['kl']:>12.2f}")
    print(f"\n{'prompt':<10}{'before PPO':<28}{'after PPO':<28}")
    marks = {True: "right", False: "wrong"}
    for i in range(min(N_SHOWN, len(prompts))):
        columns = [
            f"{side['answers'][i]:<18}{marks[side['right'][i]]:<10}" for side in (first, second)
        ]
        print(f"{prompts[i]:<10}{''.join(columns)}")
    print(
        f"\nreward over {logged[-1]['step']} steps  {sparkline([row['reward'] for row in logged])}"
    )
    print(
        f"KL over {logged[-1]['step']} steps      {sparkline([row['kl_per_response'] for row in logged])}"
    )
    print(f"\nmodel   {run / 'ppo'}   (AutoModelForCausalLM.from_pretrained reads it)")
    print(
        f"report  {run / 'ppo' / 'logs' / 'report.html'}   (curves, warnings and samples; open it in a browser)"
    )
    print(f"logs    {run / 'ppo' / 'logs'}   (metrics.jsonl, samples.jsonl, config.yaml)")
    print(f"curves  tensorboard --logdir {run / 'tensorboard'}")
    (run / "report.json").write_text(
        json.dumps({"before": before, "after": after}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
