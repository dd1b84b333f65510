"""The table at the end of distill.sh: what the student has learned, measured without the training code.

    python examples/distill_report.py --run DIR

All is about held-out prompts: the share of right greedy answers, the cross entropy of the right answers per token
(the student is never shown one of these), and the student's KL from the teacher per token of its sampled answers.
"""

import argparse
import json
from pathlib import Path

import torch
from quickstart_report import log_probs, respond, sparkline
from sort_letters import correct_answer, exact_match
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, logging
from transformers import PreTrainedTokenizerBase as Tokenizer

FIGURES = {
    "exact match": "exact match (greedy), %",
    "loss": "loss on right answers, nats per token",
    "kl": "KL from the teacher, nats per token",
}


def held_out_loss(model: PreTrainedModel, tokenizer: Tokenizer, prompts: list[str]) -> float:
    """Cross entropy of the right answers and their EOS, per token."""
    texts = [f"{prompt}{correct_answer(prompt)}{tokenizer.eos_token}" for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True)  # all are equally long
    labels = batch["input_ids"].clone()
    labels[:, : len(tokenizer(prompts[0])["input_ids"])] = -100
    return model(**batch, labels=labels).loss.item()


@torch.no_grad()
def measure(
    model: PreTrainedModel, teacher: PreTrainedModel, tokenizer: Tokenizer, prompts: list[str]
) -> dict[str, float]:
    """Figures of one model."""
    greedy = respond(model, tokenizer, prompts, greedy=True)
    sampled = respond(model, tokenizer, prompts, greedy=False)
    log_ratio = log_probs(model, sampled) - log_probs(teacher, sampled)
    return {
        "exact match": 100 * exact_match(prompts, greedy["answers"]),
        "loss": held_out_loss(model, tokenizer, prompts),
        "kl": (log_ratio.sum() / sampled["answered"].sum()).item(),
    }


def main() -> None:
    """Print the table and keep it as report.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of distill.sh")
    run = parser.parse_args().run
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(run / "teacher", padding_side="left")
    teacher = AutoModelForCausalLM.from_pretrained(run / "teacher").eval()
    rows = (run / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["input"] for row in rows]
    figures: dict[str, dict[str, float]] = {}
    for name, folder in (("teacher", "teacher"), ("before", "sft"), ("after", "student")):
        model = AutoModelForCausalLM.from_pretrained(run / folder).eval()
        figures[name] = measure(model, teacher, tokenizer, prompts)

    print(f"\n{f'held-out prompts: {len(prompts)}':<40}{'teacher':>10}{'before':>10}{'after':>10}")
    for figure, label in FIGURES.items():
        print(f"{label:<40}" + "".join(f"{column[figure]:>10.3g}" for column in figures.values()))

    logs = run / "student" / "logs"
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    curve = [line["kl"] for line in lines if "kl" in line]
    print(f"\nKL per token over {lines[-1]['step']} steps  {sparkline(curve)}")
    print(f"report  {logs / 'report.html'}   (curves, warnings and samples; open it in a browser)")
    (run / "report.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
