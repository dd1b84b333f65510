"""Scores from a reward model in the same process: what it reads, of a whole response or of each of its steps."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RewardConfig
from openppo.datasets.conversation import render_chat, with_answer
from openppo.datasets.template_checks import left_out, require_read
from openppo.datasets.templates import Message, encode_start, end_with_eos, text_of
from openppo.media import Media
from openppo.models.batching import MicroBatchSize
from openppo.models.equal_batches import equal_batches
from openppo.models.padding import pad_right
from openppo.models.pretrained import check_token_ids, context_length
from openppo.rewards.response_text import response_text
from openppo.rewards.scoring import (
    check_number,
    check_scores,
    name_sample,
    refuse_images,
    score_of_steps,
    span_texts,
    step_tokens,
)
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Prompt, Score, Trajectory

Model = Callable[[Tensor, Tensor], Tensor]
_CUT = "\ue000" * 3  # private-use characters, which no text holds and no template changes


def policy_tokens(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> list[int]:
    """Token ids as the policy wrote them; a response that ended with EOS ends as ``train_rm``'s examples do.

    Where a chat template ends a turn with another token than EOS, sampling stops there (``<|end|>`` of Phi-3), but what
    the template writes behind it and EOS belong to the examples, and EOS is where the score is read. ``ValueError`` if
    the chat template refuses the prompt.
    """
    ids, eos = trajectory.token_ids, tokenizer.eos_token_id
    if not trajectory.finish_reason.is_complete or ids[-1] == eos or eos is None:
        return ids
    behind: list[int] = []  # what follows the token at which sampling ended
    prompt = trajectory.prompt
    asked = prompt.messages or (
        [{"role": "user", "content": prompt.text}] if trajectory.episode else None
    )
    if asked is not None:
        texts = [{**message, "content": text_of(message.get("content"))} for message in asked]
        _, _, text = render_chat(with_answer(texts, _CUT), tokenizer).partition(_CUT)
        end = tokenizer(text, add_special_tokens=False)["input_ids"]
        behind = end[end.index(ids[-1]) + 1 :] if ids[-1] in end else []
    return [*ids, *end_with_eos(tokenizer, behind)]


class RewardModelText:
    """Trajectories as token ids of the reward model.

    An episode's messages, or a chat with all that follows the prompt as the assistant's last turn, are rendered with
    the reward model's own chat template; any other text is the prompt's followed by the response's. A response that the
    policy ended itself ends with the reward model's EOS; nothing follows one that was cut off. ``source`` is the flag
    and name of the reward model, for messages.
    """

    def __init__(
        self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, source: str
    ) -> None:
        if own.eos_token_id is None:
            raise ValueError(
                f"{source}: its tokenizer has no EOS token, at which a finished response is scored."
            )
        self.policy = policy
        self.own = own
        self.source = source

    def __call__(self, trajectory: Trajectory) -> list[int]:
        """Token ids of prompt and response. ``ValueError`` if the chat template refuses them."""
        if trajectory.episode is not None:
            messages = trajectory.episode.messages
            ended = trajectory.finish_reason.is_complete or bool(messages[-1].get("tool_calls"))
            return self._encode_chat(messages, ended)
        response = response_text(trajectory, self.policy)
        return self._encode(trajectory.prompt, response, trajectory.finish_reason.is_complete)

    def check(self, prompts: Iterable[Prompt], episodes: bool = False) -> None:
        """``check_chats`` with answers that end and that are cut off; ``episodes`` need a chat template."""
        if episodes and not self.own.chat_template:
            raise ValueError(
                f"{self.source}: its tokenizer has no chat template, which episodes are rendered with. Use a reward "
                "model with the policy's vocabulary, or one of a chat model."
            )
        if episodes and (missing := left_out(self.own) - {"tools"}):
            names = " and ".join(sorted(missing))
            logger.warning(
                "%s: its chat template leaves out %s of tools, so they are not scored",
                self.source,
                names,
            )
        for ended in (True, False):
            encode = partial(self._encode, response="a", ended=ended)
            check_chats(prompts, self.source, "--apply_chat_template", encode=encode)
        check_chats(prompts, self.source, "--apply_chat_template", encode=self._require_read)

    def _require_read(self, prompt: Prompt) -> None:
        """``ValueError`` for a chat of which the reward model's template leaves a message out."""
        if prompt.messages is not None:
            messages = with_answer(prompt.messages, "a")
            render = partial(render_chat, tokenizer=self.own)
            require_read(messages, render(messages), render)

    def _encode(self, prompt: Prompt, response: str, ended: bool) -> list[int]:
        if prompt.messages is not None:
            return self._encode_chat(with_answer(prompt.messages, response), ended)
        ids = encode_start(self.own, prompt.text + response)
        return end_with_eos(self.own, ids) if ended else ids

    def _encode_chat(self, messages: Sequence[Message], ended: bool) -> list[int]:
        *before, last = messages
        if not ended:  # the rendering ends where the response was cut off: no closing tag, no EOS
            last = {**last, "content": text_of(last.get("content")) + _CUT}
        text, cut, _ = render_chat([*before, last], self.own).partition(_CUT)
        if not ended and not cut:
            raise ValueError("it leaves the assistant's turn out")
        ids: list[int] = self.own(text, add_special_tokens=False)["input_ids"]
        return end_with_eos(self.own, ids) if ended else ids


def check_chats(
    prompts: Iterable[Prompt], source: str, flag: str, encode: Callable[[Prompt], object]
) -> None:
    """``ValueError`` naming ``source`` if chats cannot be rendered: tries one prompt for each sequence of roles."""
    for prompt in {
        tuple(m["role"] for m in prompt.messages or ()): prompt for prompt in prompts
    }.values():
        try:
            encode(prompt)
        except ValueError as error:
            raise ValueError(f"{source}: {error} (leave {flag} out)") from error


def read_tokens(
    trajectory: Trajectory,
    *,
    encode: Callable[[Trajectory], list[int]],
    config: PreTrainedConfig,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """What a reward model reads: the last ids of ``encode`` that fit. ``ValueError`` names ``source`` and sample."""
    try:
        ids = encode(trajectory)
    except ValueError as error:
        raise ValueError(f"{source}: {name_sample(trajectory)}: {error}") from error
    ids = last_tokens(ids, context_length(config), source, trajectory=trajectory)
    check_token_ids(config, source, tokenizer, rows=[ids])
    return ids


def last_tokens(
    ids: list[int], context: int | None, source: str, trajectory: Trajectory
) -> list[int]:
    """The last ``context`` of ``ids``, with a warning naming ``source`` where that leaves some out.

    ``ValueError`` for those of images, which cannot be cut.
    """
    if context is None or len(ids) <= context:
        return ids
    if trajectory.prompt.media:
        what = f"{source} reads {context} tokens, and {name_sample(trajectory)} has {len(ids)} with its images"
        raise ValueError(
            f"{what}: lower --generate_max_len or --max_pixels, or use another reward model."
        )
    logger.warning(
        "%s reads %d tokens, but %s has %d of its tokens: the first are left out",
        *(source, context, name_sample(trajectory), len(ids)),
    )
    return ids[-context:]


@dataclass
class ModelScorer:
    """Scores from a reward model: (output - ``mean``) / ``std`` at the last token of what ``encode`` gives.

    ``encode`` makes the token ids that the model reads, by default those of the policy. ``size`` is that of a forward.
    """

    model: Model
    size: MicroBatchSize
    pad_token_id: int
    comm: Comm
    device: torch.device
    name: str = "reward"
    encode: Callable[[Trajectory], list[int]] = attrgetter("token_ids")
    sees: bool = False
    mean: float = 0.0
    std: float = 1.0
    collective = True

    def __str__(self) -> str:
        return "the reward model"

    @timed("reward_model")
    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        if not self.sees:
            refuse_images(str(self), trajectories)
        rows, media = (
            [self.encode(trajectory) for trajectory in trajectories],
            [t.prompt.media for t in trajectories],
        )
        outputs: dict[int, float] = {}
        batches = equal_batches([len(row) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "scoring", enabled=self.comm.rank == 0):
            ids = [rows[i] for i in batch] or [[self.pad_token_id] * 2]
            given = ids, self.pad_token_id, self.device, [media[i] for i in batch]
            outputs.update(zip(batch, forward_scores(self.model, *given), strict=False))
        scores = check_scores([outputs[i] for i in range(len(rows))], trajectories, str(self))
        return [Score({self.name: (score - self.mean) / self.std}) for score in scores]


@torch.no_grad()
def forward_scores(
    model: Model,
    rows: Sequence[Sequence[int]],
    pad_token_id: int,
    device: torch.device,
    media: Sequence[Media] = (),
) -> list[float]:
    """The reward model's scores of ``rows`` of token ids, with their ``media`` if there are some, in one forward."""
    sequences, attention_mask = pad_right(rows, pad_token_id)
    more = {"media": media} if any(media) else {}
    return model(sequences.to(device), attention_mask.to(device), **more).tolist()


Render = Callable[[Prompt, list[str]], tuple[list[int], list[int]]]
"""Token ids of a prompt and the steps after it, and where in them the placeholder of each step is."""
_AGGREGATES: dict[str, Any] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}


class JudgedSteps(NamedTuple):
    """Steps of a trajectory as a process reward model reads them."""

    token_ids: list[int]  # the model's own
    places: list[int]  # of the placeholders in them, one for each step
    ends: list[int]  # index in the trajectory of each step's last token


@dataclass
class ProcessScorer:
    """Scores from ``model``, which maps sequences and places, both (B, L), to logits (N, V) at the N places.

    Steps are what ``--step_separator`` divides the response into, blank ones left out; ``render`` writes them for the
    model, with a placeholder after each. Of more than ``context`` tokens the last are kept, and steps before them are
    not judged. A step is worth p(good), the softmax over ``reward_ids`` (good, bad) at its placeholder. With
    ``--prm_aggregate steps`` that is the reward of its last token, times the weight of ``name``; else all steps of a
    response make one reward ``name``, which is 0 for a response without steps. ``where`` is the model's flag and name,
    for messages, ``policy`` the tokenizer of the trajectories.
    """

    model: Model
    render: Render
    policy: PreTrainedTokenizerBase
    reward_ids: tuple[int, int]
    options: RewardConfig
    where: str
    context: int | None
    pad_token_id: int
    size: MicroBatchSize
    comm: Comm
    device: torch.device
    name: str = "prm"
    collective = True

    def __str__(self) -> str:
        return self.where

    @timed("reward_model")
    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory; forwards run over neighbours in length."""
        refuse_images(str(self), trajectories)
        rows = [self.read(trajectory) for trajectory in trajectories]
        good: dict[int, list[float]] = {}
        batches = equal_batches([len(row.token_ids) for row in rows], self.size, self.comm)
        for batch in progress_bar(batches, "judging steps", enabled=self.comm.rank == 0):
            good.update(zip(batch, self._forward([rows[i] for i in batch]), strict=True))
        return [self._score(t, rows[i], good.get(i, [])) for i, t in enumerate(trajectories)]

    def read(self, trajectory: Trajectory) -> JudgedSteps:
        """Steps as the model reads them; no tokens for a response without steps."""
        separator, texts = self.options.step_separator, span_texts(trajectory, self.policy)
        pieces = [
            piece.rstrip() for text in texts for piece in text.split(separator) if piece.strip()
        ]
        if not pieces:
            return JudgedSteps([], [], [])
        ends = step_tokens(trajectory, self.policy, separator)
        ids, places = self.render(
            trajectory.prompt, [pieces[0], *(separator + piece for piece in pieces[1:])]
        )
        read = last_tokens(ids, self.context, self.where, trajectory=trajectory)
        places = [place - (len(ids) - len(read)) for place in places]
        n_cut = sum(place < 0 for place in places)
        return JudgedSteps(read, places[n_cut:], ends[n_cut:])

    @torch.no_grad()
    def _forward(self, rows: Sequence[JudgedSteps]) -> list[list[float]]:
        """p(good) of the steps of each row; without rows the model runs all the same."""
        pad = self.pad_token_id
        sequences, _ = pad_right([row.token_ids for row in rows] or [[pad] * 2], pad)
        places = torch.zeros(sequences.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            places[i, row.places] = True
        logits: Tensor = self.model(sequences.to(self.device), places.to(self.device))  # (N, V)
        good = logits[:, list(self.reward_ids)].float().softmax(-1)[:, 0].cpu()  # (N,)
        return [part.tolist() for part in good.split([len(row.places) for row in rows])]

    def _score(self, trajectory: Trajectory, steps: JudgedSteps, good: list[float]) -> Score:
        good = [check_number(p, trajectory, str(self)) for p in good]
        if self.options.prm_aggregate != "steps":
            return Score(
                {self.name: _AGGREGATES[self.options.prm_aggregate](good) if good else 0.0}
            )
        weight = self.options.weights().get(self.name, 1.0)
        return score_of_steps(trajectory, steps.ends, [weight * p for p in good])
