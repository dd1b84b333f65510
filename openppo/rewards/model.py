"""Scores of whole responses from a reward model in the same process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.datasets.conversation import render_chat, with_answer
from openppo.datasets.template_checks import left_out, require_read
from openppo.datasets.templates import Message, encode_start, end_with_eos, text_of
from openppo.model_inputs import ModelInputs
from openppo.models.batching import MicroBatchSize
from openppo.models.equal_batches import equal_batches
from openppo.models.pretrained import check_token_ids, context_length
from openppo.rewards.response_text import response_text
from openppo.rewards.scoring import (
    check_scores,
    name_sample,
    refuse_images,
)
from openppo.tracking import progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Prompt, Sample, Score

Model = Callable[[ModelInputs], Tensor]
_CUT = "\ue000" * 3
"""Private-use characters, which no text holds and no template changes."""


def policy_tokens(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Token ids as the policy wrote them; a complete response ends as in ``train_rm``'s examples.

    If a chat template ends a turn with a token other than EOS (``<|end|>`` of Phi-3), sampling stops at that token, but
    the examples continue with the rest of the template and EOS, where the score is read. ``ValueError`` if the chat
    template refuses the prompt.
    """
    ids = sample.last.token_ids
    eos = tokenizer.eos_token_id
    if not sample.last.finish_reason.is_complete or ids[-1] == eos or eos is None:
        return ids

    messages = sample.prompt.messages
    if not messages and sample.episode:
        messages = [{"role": "user", "content": sample.prompt.text}]
    ending = _template_after(ids[-1], messages, tokenizer) if messages else []
    return [*ids, *end_with_eos(tokenizer, ending)]


def _template_after(
    token_id: int, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Token ids that the chat template writes after an answer, starting after ``token_id``."""
    texts = [{**message, "content": text_of(message.get("content"))} for message in messages]
    _, _, text = render_chat(with_answer(texts, _CUT), tokenizer).partition(_CUT)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[ids.index(token_id) + 1 :] if token_id in ids else []


class RewardModelText:
    """Samples as token ids of the reward model's ``tokenizer``; ``policy`` is the policy's.

    An episode's messages, or a chat with all that follows the prompt as the assistant's last turn, are rendered with
    the reward model's own chat template; any other text is that of the prompt followed by that of the response. A
    response that the policy ended itself ends with the reward model's EOS; nothing follows a response that was cut off.
    ``where`` is the flag and name of the reward model, for messages.
    """

    def __init__(
        self, policy: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, where: str
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{where}: its tokenizer has no EOS token, at which a finished response is scored."
            )
        self.policy = policy
        self.tokenizer = tokenizer
        self.where = where

    def __call__(self, sample: Sample) -> list[int]:
        """Token ids of prompt and response. ``ValueError`` if the chat template refuses them."""
        is_complete = sample.last.finish_reason.is_complete
        if sample.episode is not None:
            messages = sample.episode.messages
            has_ended = is_complete or bool(messages[-1].get("tool_calls"))
            return self._encode_chat(messages, has_ended)
        response = response_text(sample, self.policy)
        return self._encode(sample.prompt, response, is_complete)

    def check(self, prompts: Iterable[Prompt], episodes: bool = False) -> None:
        """Check chats with a finished and with a cut-off answer; ``episodes`` need a chat template."""
        if episodes:
            self._check_template()
        for has_ended in (True, False):
            encode = partial(self._encode, response="a", has_ended=has_ended)
            check_chats(prompts, self.where, "--apply_chat_template", encode=encode)
        check_chats(prompts, self.where, "--apply_chat_template", encode=self._require_read)

    def _check_template(self) -> None:
        """Raise ``ValueError`` without a chat template for episodes; warn if the template leaves tools out."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.where}: its tokenizer has no chat template, which episodes are rendered with. Use a reward "
                "model with the policy's vocabulary, or one of a chat model."
            )
        missing = left_out(self.tokenizer) - {"tools"}
        if missing:
            logger.warning(
                "%s: its chat template leaves out %s of tools, so they are not scored",
                self.where,
                " and ".join(sorted(missing)),
            )

    def _require_read(self, prompt: Prompt) -> None:
        """Raise ``ValueError`` if the reward model's template leaves a message of the chat out."""
        if prompt.messages is not None:
            messages = with_answer(prompt.messages, "a")
            render = partial(render_chat, tokenizer=self.tokenizer)
            require_read(messages, render(messages), render)

    def _encode(self, prompt: Prompt, response: str, has_ended: bool) -> list[int]:
        """Token ids of prompt and response; EOS follows a response that has ended."""
        if prompt.messages is not None:
            return self._encode_chat(with_answer(prompt.messages, response), has_ended)
        ids = encode_start(self.tokenizer, prompt.text + response)
        return end_with_eos(self.tokenizer, ids) if has_ended else ids

    def _encode_chat(self, messages: Sequence[Message], has_ended: bool) -> list[int]:
        """Token ids of a chat; a cut-off answer ends where it was cut, without closing tag and EOS."""
        *before, last = messages
        if not has_ended:
            last = {**last, "content": text_of(last.get("content")) + _CUT}
        text, cut, _ = render_chat([*before, last], self.tokenizer).partition(_CUT)
        if not has_ended and not cut:
            raise ValueError("it leaves the assistant's turn out")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return end_with_eos(self.tokenizer, ids) if has_ended else ids


def check_chats(
    prompts: Iterable[Prompt], where: str, flag: str, encode: Callable[[Prompt], object]
) -> None:
    """Raise ``ValueError`` naming ``where`` if chats cannot be rendered.

    Tries one prompt for each sequence of roles.
    """
    by_roles = {_roles(prompt): prompt for prompt in prompts}
    for prompt in by_roles.values():
        try:
            encode(prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error} (leave {flag} out)") from error


def _roles(prompt: Prompt) -> tuple[str, ...]:
    """Roles of a prompt's messages in order; none without a chat."""
    return tuple(message["role"] for message in prompt.messages or ())


def read_tokens(
    sample: Sample,
    *,
    encode: Callable[[Sample], list[int]],
    config: PreTrainedConfig,
    where: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """Input ids of a reward model: the last ids of ``encode`` that fit. ``ValueError`` names ``where`` and sample."""
    try:
        ids = encode(sample)
    except ValueError as error:
        raise ValueError(f"{where}: {name_sample(sample)}: {error}") from error
    ids = last_tokens(ids, context_length(config), where, sample=sample)
    check_token_ids(config, where, tokenizer, rows=[ids])
    return ids


def last_tokens(ids: list[int], context: int | None, where: str, sample: Sample) -> list[int]:
    """Keep the last ``context`` of ``ids``, with a warning naming ``where`` if some are left out.

    ``ValueError`` for a sample with images, which cannot be cut.
    """
    if context is None or len(ids) <= context:
        return ids

    name = name_sample(sample)
    if sample.last.media:
        raise ValueError(
            f"{where} reads {context} tokens, and {name} has {len(ids)} with its images: "
            "lower --generate_max_len or --max_pixels, or use another reward model."
        )
    logger.warning(
        "%s reads %d tokens, but %s has %d of its tokens: the first are left out",
        where,
        context,
        name,
        len(ids),
    )
    return ids[-context:]


@dataclass
class ModelScorer:
    """Scores from a reward model: (output - ``mean``) / ``std`` at the last token.

    ``encode`` makes the token ids that the model reads, by default those of the policy. ``size`` limits one forward.
    A model that ``sees`` reads images as well.
    """

    model: Model
    size: MicroBatchSize
    pad_token_id: int
    comm: Comm
    device: torch.device
    name: str = "reward"
    encode: Callable[[Sample], list[int]] = attrgetter("last.token_ids")
    sees: bool = False
    mean: float = 0.0
    std: float = 1.0
    collective = True

    def __str__(self) -> str:
        return "the reward model"

    @timed("reward_model")
    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample; forwards run over neighbours in length."""
        if not self.sees:
            refuse_images(str(self), samples)
        rows = [self.encode(sample) for sample in samples]
        lengths = [len(row) for row in rows]
        batches = equal_batches(lengths, self.size, self.comm)

        outputs: dict[int, float] = {}
        pad = self.pad_token_id
        for batch in progress_bar(batches, "scoring", enabled=self.comm.rank == 0):
            ids = [rows[i] for i in batch] or [[pad, pad]]  # an idle forward
            media = [samples[i].last.media for i in batch]
            inputs = ModelInputs.of_ids(ids, pad).with_media(media)
            batch_outputs = forward_scores(self.model, inputs.to(self.device))
            outputs.update(zip(batch, batch_outputs, strict=False))

        ordered = [outputs[i] for i in range(len(rows))]
        scores = check_scores(ordered, samples, str(self))
        normalized = [(score - self.mean) / self.std for score in scores]
        return [Score({self.name: score}) for score in normalized]


@torch.no_grad()
def forward_scores(model: Model, inputs: ModelInputs) -> list[float]:
    """Scores of a reward model for each row."""
    scores: list[float] = model(inputs).tolist()
    return scores
