"""Options of the supervised commands: train_sft, train_rm, train_prm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openppo.config.roles import DataFormat, parse_probs, validate_data
from openppo.config.shared import require


@dataclass(frozen=True)
class SupervisedConfig:
    """What SFT, reward-model and process-reward-model training have in common."""

    pretrain: str
    """Model to start from: a local folder or a hub name."""
    dataset: str
    """Training data: JSONL, JSON, CSV or Parquet files, folders of 'datasets', or hub names; several with commas."""
    dataset_probs: str | None = None
    """Shares in which several --dataset are mixed, with commas, until one is used up (default: all rows of all)."""
    dataset_split: str = "train"
    """Split of --dataset."""
    data_format: DataFormat = "auto"
    """Shape of the rows; 'auto' recognizes it by the columns unless their keys are given."""
    dataset_class: str | None = None
    """Your own loader of --dataset and --eval_dataset, path.py:name: called with a source, it gives rows."""
    eval_dataset: str | None = None
    """Held-out data, in any format of --dataset."""
    eval_split: str = "test"
    """Split of --eval_dataset when it has splits."""
    eval_steps: int = -1
    """Evaluate every this many optimizer steps (-1: after each epoch)."""
    max_steps: int = -1
    """Stop after this many optimizer steps (-1: after --max_epochs)."""
    learning_rate: float = 5e-6
    """Peak learning rate."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}' (with --apply_chat_template)."""
    max_samples: int | None = None
    """Use only the first this many rows of each data set."""
    max_len: int = 512
    """Longer samples are dropped, with a count in the log."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""

    def validate(self) -> None:
        validate_data(self.input_template, self.max_samples, self.apply_chat_template, self.chat_template_kwargs)
        parse_probs(self.dataset, self.dataset_probs, "dataset")
        require(self.max_len >= 2, f"--max_len must be at least 2, got {self.max_len}.")
        require(self.learning_rate >= 0, f"--learning_rate must not be negative, got {self.learning_rate}.")
        for name, value in (("eval_steps", self.eval_steps), ("max_steps", self.max_steps)):
            require(value == -1 or value >= 1, f"--{name} must be -1 or at least 1, got {value}.")


@dataclass(frozen=True)
class SFTDataConfig:
    """Columns of supervised fine-tuning data."""

    input_key: str | None = None
    """Column with the prompt (text or chat messages); no loss on it (default: recognized)."""
    output_key: str | None = "output"
    """Column with the response (default: recognized); 'None' trains on all tokens of --input_key."""

    def validate(self) -> None:
        """Nothing to check: any column name may occur."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Columns of preference data, and the loss on them."""

    prompt_key: str | None = None
    """Column with the prompt, when chosen and rejected do not contain it (default: recognized)."""
    chosen_key: str = "chosen"
    """Column with the better response."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    margin_key: str | None = None
    """Column with the margin by which chosen must win (only with --loss sigmoid)."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    value_head_prefix: str = "score"
    """Name of the scalar head."""

    def validate(self) -> None:
        require(
            self.margin_key is None or self.loss == "sigmoid",
            "--margin_key works with --loss sigmoid only: log-exp has no margin.",
        )


@dataclass(frozen=True)
class ProcessConfig:
    """Columns and tokens of process supervision: a judgement of each step of a solution."""

    input_key: str | None = None
    """Column with the solution, a placeholder token after each step (default: recognized)."""
    label_key: str | None = None
    """Column with the judgements: the same text with a reward token after each step, or a list with one per step."""
    placeholder_token: str = "ки"
    """Token after each step at which the model is trained to judge it."""
    reward_tokens: tuple[str, ...] = ("+", "-")
    """Tokens of the judgement, good first; soft labels are the probability of the first of two."""

    def validate(self) -> None:
        require(self.placeholder_token != "", "--placeholder_token must not be empty.")
        require(
            len(set(self.reward_tokens)) == len(self.reward_tokens) >= 2,
            f"--reward_tokens needs at least two different tokens, got {' '.join(self.reward_tokens)}.",
        )
