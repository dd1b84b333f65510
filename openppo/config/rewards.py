"""Options of rewards: their sources and their shaping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from openppo.config.fields import (
    NUMBER,
    Bound,
    Options,
    at_least,
    not_empty,
    not_negative,
    option,
    positive,
    require,
)

Verifier = Literal["exact_match", "regex", "math", "length"]
_verifier = Bound(
    "must be exact_match, math, regex:PATTERN or length:TOKENS",
    lambda value: (
        re.fullmatch(r"exact_match|math|regex:.+|length:[1-9]\d*", value, re.DOTALL) is not None
    ),
    {"pattern": r"^(exact_match|math|regex:[\s\S]+|length:[1-9]\d*)$"},
)
NONE = "none"
"""Value of ``--reward_fn`` for a run without any reward; a file of that name needs ./none."""
ENVIRONMENT_REWARDS = "--environment gives the rewards: leave out all other sources of rewards."
NO_REWARD = (
    "No reward is given: pass --reward_pretrain MODEL, --reward_fn FILE.py[:name], --remote_rm_url URL, "
    "--verifiable_reward NAME or --prm_pretrain MODEL; --reward_fn none learns from the KL to --ref_pretrain alone."
)


@dataclass(frozen=True)
class RewardConfig(Options):
    """Sources of rewards: one or several, whose weighted sum is the reward."""

    reward_pretrain: str | None = option(None, place=True, resume="must match")
    """Reward model: a sequence-classification checkpoint with one label, or a PEFT folder of one."""
    reward_fn: str | None = option(None, place=True, measures=True)
    """Python reward function, path.py or path.py:name; called with the values that its parameters name.
    'none': no reward at all, so that the policy learns from the KL to --ref_pretrain alone (distillation)."""
    remote_rm_url: str | None = option(None, place=True, measures=True)
    """Reward servers, URL[,URL...], or a .py file with reward_func(queries, prompts, labels)."""
    verifiable_reward: tuple[str, ...] = option((), _verifier, measures=True)
    """Built-in rewards: exact_match, math (needs math-verify) and regex:PATTERN against --label_key, or length:TOKENS.
    A response must contain the pattern, a group of which must match the label; n tokens earn 1 - |n - TOKENS| /
    TOKENS."""
    prm_pretrain: str | None = option(None, place=True, resume="must match")
    """Process reward model (openppo.cli.train_prm): rewards at the end of each step of a response."""
    reward_weights: tuple[str, ...] = option((), measures=True)
    """Weights of named rewards, NAME=NUMBER ... (default: 1 each)."""
    reward_error_value: float | None = None
    """Reward of a sample for which the reward function fails, unless for all of a step (default: end the run)."""
    reward_workers: int = option(0, at_least(0))
    """Processes on each rank that run plain functions of --reward_fn (0: one thread of the run)."""
    reward_timeout: float | None = option(None, positive, needs="reward_workers")
    """With --reward_workers: seconds for one sample; after them the function counts as failed for it."""
    remote_rm_timeout: float = option(180.0, positive, needs="remote_rm_url", of_files=True)
    """Seconds for one request to a reward server."""
    remote_rm_retries: int = option(7, at_least(0), needs="remote_rm_url", of_files=True)
    """Further attempts after a failed request, with growing pauses, before the run ends; 7 last a minute or two."""
    remote_rm_batch_size: int = option(64, at_least(1), needs="remote_rm_url", of_files=True)
    """Samples of one request to a reward server."""
    remote_rm_token_file: str | None = option(None, place=True)
    """File with the token that the reward servers require (sent as 'Authorization: Bearer TOKEN')."""
    step_separator: str = option("\n\n", not_empty)
    """Text between the steps of a response, for rewards per step."""
    prm_placeholder_token: str = option("ки", of_files=True)
    """Token after each step at which the process reward model is read."""
    prm_reward_tokens: tuple[str, ...] = option(("+", "-"), of_files=True)
    """Tokens for good and bad steps, whose probabilities the process reward model gives."""
    prm_apply_chat_template: bool = option(False, of_files=True)
    """Render prompts for the process reward model with its own chat template, as in its training."""
    prm_aggregate: Literal["steps", "min", "mean", "last", "product"] = "steps"
    """Reward each step at its end, or the whole response by one number made of its steps."""

    def problems(self) -> Iterator[str]:
        if len(self.verifiers()) < len(self.verifiable_reward):
            yield f"--verifiable_reward names one of {' '.join(self.verifiable_reward)} twice."
        if len(self.prm_reward_tokens) != 2 or len(set(self.prm_reward_tokens)) != 2:
            yield f"prm_reward_tokens needs two different tokens, got {' '.join(self.prm_reward_tokens)}."
        self.weights()

    def unknown_weights(self) -> Iterator[str]:
        """Yield the message of ``unknown_names`` about ``--reward_weights``."""
        return self.unknown_names("--reward_weights", *self.weights())

    def unknown_names(self, flag: str, *names: str | None) -> Iterator[str]:
        """Yield a message about ``names`` of rewards that no source has; functions have names of their own."""
        unknown = sorted({name for name in names if name is not None} - set(self.names()))
        if unknown and self.reward_fn is None and not self.remote_is_file():
            known = ", ".join(self.names()) or "none"
            yield f"{flag} names {', '.join(unknown)}, but the rewards are {known}. Use their names."

    @property
    def are_none(self) -> bool:
        """True for ``--reward_fn none``: the run has no reward, and the KL to the reference is all it learns from."""
        return self.reward_fn == NONE

    def verifiers(self) -> dict[Verifier, str]:
        """Return the built-in rewards by name, with pattern or number, else an empty text."""
        parts = [verifier.partition(":") for verifier in self.verifiable_reward]
        return {cast(Verifier, name): argument for name, _, argument in parts}

    def remote_is_file(self) -> bool:
        """True if ``--remote_rm_url`` names a Python file instead of a server."""
        return bool(re.search(r"\.py(:\w*)?$", self.remote_rm_url or ""))

    def names(self) -> list[str]:
        """Return the names of the rewards, one for each source; functions may add others."""
        sources: dict[str, str | None] = {
            "reward_fn": None if self.are_none else self.reward_fn,
            "remote": self.remote_rm_url,
            **{verifier: verifier for verifier in self.verifiers()},
            "reward_model": self.reward_pretrain,
            "prm": self.prm_pretrain,
        }
        names = [name for name, source in sources.items() if source is not None]
        return ["reward"] if len(names) == 1 else names

    def pass_threshold(self, pass_reward: float | None, pass_on: str | None) -> float | None:
        """Return ``--pass_reward``, else 1; None without rewards, or if a model or server of its own scale decides."""
        if self.are_none:
            return None
        if pass_reward is not None:
            return pass_reward

        has_learned = bool(self.reward_pretrain or self.remote_rm_url or self.prm_pretrain)
        learned = {"reward_model", "remote", "prm"}
        if self.names() == ["reward"]:
            learned.add("reward")
        is_learned = has_learned and (pass_on is None or pass_on in learned)
        return None if is_learned else 1.0

    def pass_problems(self, pass_reward: float | None, pass_on: str | None) -> Iterator[str]:
        """Yield a message about a ``--pass_on`` whose scale is unknown."""
        if pass_on is not None and self.pass_threshold(pass_reward, pass_on) is None:
            yield f"--pass_on {pass_on}: which reward of a reward model or server passes? Say so with --pass_reward."

    def weights(self) -> dict[str, float]:
        """Parse ``--reward_weights`` into numbers by name; ``ValueError`` for anything but NAME=NUMBER."""
        parsed: dict[str, float] = {}
        for item in self.reward_weights:
            match = re.fullmatch(rf"(.+)=\s*({NUMBER})", item)
            if match is None:
                raise ValueError(f"--reward_weights takes NAME=NUMBER ..., got {item!r}.")
            require(match[1] not in parsed, f"--reward_weights names {match[1]!r} twice.")
            parsed[match[1]] = float(match[2])
        return parsed


@dataclass(frozen=True)
class RewardShapingConfig(Options):
    """Shaping of a score before it becomes the reward of the last action."""

    normalize_reward: Literal["off", "model", "running", "group"] = option(
        "off", measures=True, alone="model"
    )
    """Subtract the mean of the scores and divide by their std.
    Mean and std are stored by the reward model (model, or the option alone), of all scores of the run so far (running),
    or of the responses to the same prompt (group); the last two are of whole rewards, steps included."""
    reward_clip_range: tuple[float, float] = option((-10.0, 10.0), may_be_infinite=True)
    """Scores are clipped to this range before they enter the token rewards; -inf inf clips none."""
    missing_eos_penalty: float | None = option(None, not_negative, ": it is subtracted")
    """Subtract this from the score of a response that --generate_max_len cut off."""
    overlong_filter: bool = False
    """Leave responses that --generate_max_len cut off out of the losses (DAPO)."""
    overlong_buffer_len: int | None = option(None, at_least(1))
    """Penalize responses that end within this many tokens of --generate_max_len, up to --overlong_penalty_factor."""
    overlong_penalty_factor: float = option(1.0, not_negative, ": it is subtracted")
    """Largest penalty of --overlong_buffer_len."""

    def problems(self) -> Iterator[str]:
        low, high = self.reward_clip_range
        if low >= high:
            yield f"--reward_clip_range needs two rising numbers, got {low} {high}."
