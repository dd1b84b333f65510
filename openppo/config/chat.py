"""Options of the commands that people use by hand: chat, check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.data import parse_template_kwargs
from openppo.config.fields import Options, not_empty, not_negative, option, require
from openppo.config.rollout import ResponseConfig


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ResponseConfig):
    """Options of openppo.cli.chat."""

    folder: str = option(place=True)
    """Causal language model: a local folder (also a PEFT folder) or a hub name."""
    temperature: float = option(0.7, not_negative)
    """Sampling temperature (0: the likeliest token)."""
    system: str | None = option(None, not_empty)
    """Text of a system message at the start of each conversation."""
    chat_template: str | None = option(None, place=True)
    """Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}'."""
    seed: int = option(42, not_negative)
    """Seed of sampling: the same seed and lines give the same answers."""
    bf16: bool = False
    """Load the model in bfloat16."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Norms, rotary embeddings and gated MLPs in one kernel each (auto: on GPUs, with liger-kernel installed)."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's attention."""
    trust_remote_code: bool = False
    """Run Python code from the model or tokenizer repository, with your permissions; else such models are refused."""

    @property
    def pretrain(self) -> str:
        """The model, by the name that other commands have for it."""
        return self.folder

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.folder:
            yield "FOLDER is empty: name the folder of a model."
        parse_template_kwargs(self.chat_template_kwargs)

    def validate(self, world_size: int = 1) -> None:
        super().validate()
        require(world_size == 1, "chat runs in one process: start it without torchrun.")


@dataclass(frozen=True)
class CheckConfig(Options):
    """Options of openppo.cli.check."""

    def validate(self, world_size: int = 1) -> None:
        super().validate()
        require(world_size == 1, "check runs in one process: start it without torchrun.")
