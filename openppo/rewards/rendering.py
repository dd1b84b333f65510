"""Token ids that a reward model reads of a trajectory: the policy's, or its text in tokens of the model's own."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import encode_start, end_with_eos
from openppo.rewards.scoring import name_sample
from openppo.types import Prompt, Trajectory
from openppo.user_code import TEMPLATE_ERRORS

logger = logging.getLogger("openppo")

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
    if trajectory.prompt.messages is not None:
        _, _, text = _render(tokenizer, trajectory.prompt.messages, _CUT).partition(_CUT)
        end = tokenizer(text, add_special_tokens=False)["input_ids"]
        behind = end[end.index(ids[-1]) + 1 :] if ids[-1] in end else []
    return [*ids, *end_with_eos(tokenizer, behind)]


class RewardModelText:
    """Trajectories as token ids of the reward model.

    A chat is rendered with the reward model's own chat template, all that follows the prompt as the assistant's last
    turn; any other text is the prompt's followed by the response's. A response that the policy ended itself ends with
    the reward model's EOS; nothing follows one that was cut off. ``source`` is the flag and name of the reward model,
    for messages.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, source: str) -> None:
        if own.eos_token_id is None:
            raise ValueError(f"{source}: its tokenizer has no EOS token, at which a finished response is scored.")
        self.policy = policy
        self.own = own
        self.source = source

    def __call__(self, trajectory: Trajectory) -> list[int]:
        """Token ids of prompt and response. ``ValueError`` if the chat template refuses them."""
        start = trajectory.spans[0].start if trajectory.spans else len(trajectory.token_ids)
        response = str(self.policy.decode(trajectory.token_ids[start:], skip_special_tokens=True))
        return self._encode(trajectory.prompt, response, trajectory.finish_reason.is_complete)

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
                for ended in (True, False):
                    self._encode(prompt, "a", ended)
            except ValueError as error:
                refused = f"its chat template refuses messages with the roles {', '.join(roles)}"
                raise ValueError(f"{self.source}: {refused}: {error}") from error

    def _encode(self, prompt: Prompt, response: str, ended: bool) -> list[int]:
        if prompt.messages is None:
            ids = encode_start(self.own, prompt.text + response)
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


def last_tokens(ids: list[int], context: int | None, source: str, trajectory: Trajectory) -> list[int]:
    """The last ``context`` of ``ids``, with a warning naming ``source`` where that leaves some out."""
    if context is None or len(ids) <= context:
        return ids
    logger.warning(
        "%s reads %d tokens, but %s has %d of its tokens: the first are left out",
        *(source, context, name_sample(trajectory), len(ids)),
    )
    return ids[-context:]
