"""Rewards of three rows of data, which --dry_run shows before any model is loaded."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from openppo.rewards.scoring import Scorer
from openppo.tracking.console import escape_control, table_lines
from openppo.types import Completion, FinishReason, Prompt, Sample, Score

_ROWS = 3
_LONGEST = 240  # characters of a text
_TITLE = "rewards of the first rows; the response is the label, empty without one"


def trial_lines(
    scorer: Scorer, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Score the labels of the first ``prompts`` as responses; return lines for the log."""
    samples = []
    for group, prompt in enumerate(prompts[:_ROWS]):
        samples.append(_labelled(prompt, tokenizer, group))

    lines = [_TITLE, ""]
    for sample, score in zip(samples, scorer.score(samples), strict=True):
        prompt_text = escape_control(sample.prompt.text, _LONGEST, keep="end")
        response = escape_control(_response(sample.prompt), _LONGEST)
        facts = [
            ("prompt", prompt_text),
            ("response", response),
            ("earned", escape_control(_described(score))),
        ]
        lines += [*table_lines(facts), ""]
    return lines


def _labelled(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, group: int) -> Sample:
    """Sample whose response is the label of its prompt, ended with EOS."""
    response = tokenizer.encode(_response(prompt), add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        response = [*response, tokenizer.eos_token_id]
    completion = Completion(
        response,
        log_probs=[0.0] * len(response),
        versions=[0] * len(response),
        finish_reason=FinishReason.STOP,
    )
    return Sample.of_response(prompt, completion, group)


def _response(prompt: Prompt) -> str:
    """Label of a prompt as text."""
    return "" if prompt.label is None else str(prompt.label)


def _described(score: Score) -> str:
    """Rewards by name, the sum of token rewards, and the reason if a source failed."""
    parts = [f"{name} {reward:.4g}" for name, reward in score.rewards.items()]
    if score.token_rewards is not None:
        parts.append(f"tokens {sum(score.token_rewards):.4g}")
    if score.failed:
        parts.append(f"in place of a failure: {score.error}")
    return ", ".join(parts)
