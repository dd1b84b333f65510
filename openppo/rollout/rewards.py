"""Scores for trajectories: a reward model in process, or a Python function of the user."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from openppo.models.padding import pad_right
from openppo.tracking import progress
from openppo.types import Comm, RewardFunction, Trajectory

_DEFAULT_NAME = "reward_fn"


class Scorer(Protocol):
    """Scores whole trajectories. Called on all ranks together, each with its own share."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """One finite number per trajectory."""
        ...


class ModelScorer:
    """Scores from a reward model that reads the actor's token ids: its output at the last real token.

    Every rank runs as many forwards as the rank with the most, as partitioned weights demand.
    """

    def __init__(
        self,
        model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        micro_batch_size: int,
        pad_token_id: int,
        comm: Comm,
        device: torch.device,
    ) -> None:
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.pad_token_id = pad_token_id
        self.comm = comm
        self.device = device

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """One score per trajectory; forwards run over neighbours in length."""
        order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].token_ids), reverse=True)
        size = self.micro_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        n_forwards = int(self.comm.all_reduce(torch.tensor(len(batches)), "max"))
        scores: dict[int, float] = {}
        for k in progress(range(n_forwards), "scoring", enabled=self.comm.rank == 0):
            rows = batches[k] if k < len(batches) else []
            ids = [trajectories[i].token_ids for i in rows] or [[self.pad_token_id] * 2]
            sequences, attention_mask = pad_right(ids, self.pad_token_id)
            outputs = self.model(sequences.to(self.device), attention_mask.to(self.device)).tolist()
            scores.update(zip(rows, outputs, strict=False))
        return check_scores([scores[i] for i in range(len(trajectories))], trajectories, "the reward model")


class FunctionScorer:
    """Scores from ``reward_fn(prompts, responses, labels) -> list of numbers``; responses without special tokens."""

    def __init__(self, function: RewardFunction, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.function = function
        self.name = name
        self.tokenizer = tokenizer

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Calls the function once with all trajectories of this rank."""
        if not trajectories:
            return []
        prompts = [t.prompt.text for t in trajectories]
        responses = self.tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
        scores = self.function(prompts, responses, [t.prompt.label for t in trajectories])
        if not isinstance(scores, Iterable):
            raise ValueError(f"--reward_fn {self.name} returned {scores!r}; a list of one number per sample is needed.")
        return check_scores(list(scores), trajectories, f"--reward_fn {self.name}")


def check_scores(scores: Sequence[Any], trajectories: Sequence[Trajectory], source: str) -> list[float]:
    """The scores as floats; ``ValueError`` naming ``source`` and the sample for a wrong number of them or a bad one."""
    if len(scores) != len(trajectories):
        raise ValueError(f"{source} returned {len(scores)} scores for {len(trajectories)} samples; one each is needed.")
    numbers = []
    for score, trajectory in zip(scores, trajectories, strict=True):
        single = hasattr(score, "item") and math.prod(score.shape) == 1  # of NumPy or torch
        number = score.item() if single else score
        if not (isinstance(number, int | float) and math.isfinite(number)):
            raise ValueError(
                f"{source} returned {score!r} for prompt {trajectory.prompt.text!r}; a finite number is needed."
            )
        numbers.append(float(number))
    return numbers


def load_reward_function(source: str) -> RewardFunction:
    """The function of ``path.py`` or ``path.py:name`` (default name ``reward_fn``); ``ValueError`` naming the flag."""
    parts = re.fullmatch(r"(.+\.py)(?::(\w*))?", source)
    if parts is None:
        raise ValueError(f"--reward_fn {source}: give a Python file, path.py or path.py:name.")
    file, name = Path(parts[1]).expanduser(), parts[2] or _DEFAULT_NAME
    if not file.is_file():
        raise ValueError(f"--reward_fn {source}: no such file {file}. Check the path.")
    spec = importlib.util.spec_from_file_location(f"reward_fn_{file.stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"--reward_fn {source}: cannot be imported ({error}). Install what it needs.") from error
    function = vars(module).get(name)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(
            f"--reward_fn {source}: {file} has no function {name!r}. It has: {', '.join(functions) or 'none'}. "
            f"Name one of them as {file}:NAME."
        )
    return function
