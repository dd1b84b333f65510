"""What a reward model reads of a trajectory: the policy's tokens, or its text in tokens of its own."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import end_with_eos
from openppo.rewards.scoring import name_sample
from openppo.types import Prompt, Trajectory
from openppo.user_code import TEMPLATE_ERRORS

logger = logging.getLogger("openppo")

_CUT = "\ue000" * 3  # private-use characters, which no text holds and no template changes


class PolicyTokens:
    """Trajectories as the policy wrote them; a response that ended with EOS ends as ``train_rm``'s examples do.

    Where a chat template ends a turn with another token than EOS, sampling stops there (``<|end|>`` of Phi-3), but what
    the template writes behind it and EOS belong to the examples, and EOS is where the score is read. Of more than
    ``context`` tokens the last are kept. ``source`` is the flag and name of the reward model, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, context: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.context = context

    def __call__(self, trajectory: Trajectory) -> list[int]:
        """Token ids of prompt and response. ``ValueError`` names a sample that the chat template refuses."""
        ids, eos = trajectory.token_ids, self.tokenizer.eos_token_id
        if trajectory.finish_reason.is_complete and ids[-1] != eos and eos is not None:
            try:
                ids = [*ids, *self._behind(trajectory.prompt, ids[-1])]
            except ValueError as error:
                raise _refused(self.source, trajectory, error) from error
        return _last_of(ids, self.context, self.source, trajectory)

    def _behind(self, prompt: Prompt, stop: int) -> list[int]:
        """What follows ``stop``, at which sampling ended, up to EOS."""
        behind: list[int] = []
        if prompt.messages is not None:
            _, _, text = _render(self.tokenizer, prompt.messages, _CUT).partition(_CUT)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            behind = ids[ids.index(stop) + 1 :] if stop in ids else []
        return end_with_eos(self.tokenizer, behind)


class RewardModelText:
    """Trajectories as token ids of the reward model.

    A chat is rendered with the reward model's own chat template, all that follows the prompt as the assistant's last
    turn; any other text is the prompt's followed by the response's. A response that the policy ended itself ends with
    the reward model's EOS; nothing follows one that was cut off. Of more than ``context`` tokens the last are kept.
    ``source`` is the flag and name of the reward model, for messages.
    """

    def __init__(
        self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, source: str, context: int | None = None
    ) -> None:
        if own.eos_token_id is None:
            raise ValueError(f"{source}: its tokenizer has no EOS token, at which a finished response is scored.")
        self.policy = policy
        self.own = own
        self.source = source
        self.context = context

    def __call__(self, trajectory: Trajectory) -> list[int]:
        """Token ids of prompt and response. ``ValueError`` names a sample that the chat template refuses."""
        start = trajectory.spans[0].start if trajectory.spans else len(trajectory.token_ids)
        response = str(self.policy.decode(trajectory.token_ids[start:], skip_special_tokens=True))
        ended = trajectory.finish_reason.is_complete
        try:
            ids = self._encode(trajectory.prompt, response, ended)
        except ValueError as error:
            raise _refused(self.source, trajectory, error) from error
        return _last_of(ids, self.context, self.source, trajectory)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """``ValueError`` if chats cannot be rendered: tries one prompt for each sequence of roles, before a run."""
        by_roles = {tuple(m["role"] for m in prompt.messages): prompt for prompt in prompts if prompt.messages}
        if by_roles and not self.own.chat_template:
            raise ValueError(
                f"{self.source}: its tokenizer has no chat template, and the prompts are chats. Leave "
                "--apply_chat_template out, or use a reward model that has one."
            )
        for roles, prompt in by_roles.items():
            try:
                self._encode(prompt, "a", ended=True)
                self._encode(prompt, "a", ended=False)
            except ValueError as error:
                raise ValueError(
                    f"{self.source}: its chat template refuses messages with the roles {', '.join(roles)}: {error}"
                ) from error

    def _encode(self, prompt: Prompt, response: str, ended: bool) -> list[int]:
        if prompt.messages is None:
            ids = encode_text(self.own, prompt.text + response)
        else:
            # Of a response that was cut off, the rendering ends where it does: no closing tag, no EOS.
            text, cut, _ = _render(self.own, prompt.messages, response + ("" if ended else _CUT)).partition(_CUT)
            if not ended and not cut:
                raise ValueError("it leaves the assistant's turn out")
            ids = self.own(text, add_special_tokens=False)["input_ids"]
        return end_with_eos(self.own, ids) if ended else ids


def _render(tokenizer: PreTrainedTokenizerBase, asked: Sequence[dict[str, Any]], answer: str) -> str:
    messages = [*asked, {"role": "assistant", "content": answer}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TEMPLATE_ERRORS as error:
        raise ValueError(str(error)) from error


def _refused(source: str, trajectory: Trajectory, error: Exception) -> ValueError:
    return ValueError(f"{source}: its chat template fails on {name_sample(trajectory)}: {error}")


def _last_of(ids: list[int], context: int | None, source: str, trajectory: Trajectory) -> list[int]:
    if context is None or len(ids) <= context:
        return ids
    logger.warning(
        "%s reads %d tokens, but %s has %d of its tokens: the first are left out",
        *(source, context, name_sample(trajectory), len(ids)),
    )
    return ids[-context:]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text``, with what the tokenizer puts before a text (a BOS) once, and nothing after it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return ids if ids[:start] == full[:start] else full[:start] + ids
