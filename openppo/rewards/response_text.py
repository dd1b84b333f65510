"""Text of what the policy wrote: without what ends or pads it, with every other special token."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.types import Trajectory

_MENTIONED = set[str]()  # a special token that the log has named


def response_text(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text from the first action on, of several turns with what an environment wrote between them.

    Token ids of "<reason>4</reason><eos>" give "<reason>4</reason>", though the tags are special tokens.
    """
    start = trajectory.spans[0][0] if trajectory.spans else len(trajectory.token_ids)
    ids, is_complete = trajectory.token_ids[start:], trajectory.finish_reason.is_complete
    return text_of_ids(
        written_ids(ids, tokenizer, is_complete=is_complete, stop=trajectory.stop), tokenizer
    )


def written_spans(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each span of actions, up to those that end or pad it."""
    spans = trajectory.spans
    ended = [True] * (len(spans) - 1) + [trajectory.finish_reason.is_complete]
    return [
        written_ids(
            trajectory.token_ids[start:end],
            tokenizer,
            is_complete=is_complete,
            stop=trajectory.stop,
        )
        for (start, end), is_complete in zip(spans, ended, strict=False)
    ]


def written_ids(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_complete: bool,
    stop: Sequence[str] = (),
) -> list[int]:
    """Token ids without those at the end that only end or pad a response.

    These are EOS and PAD and, if ``is_complete``, another special token with which a turn ended (``<|end|>`` of Phi-3),
    but not one that completes a text of ``stop``.
    """
    end, silent = len(ids), (tokenizer.eos_token_id, tokenizer.pad_token_id)
    while end > 0 and ids[end - 1] in silent:
        end -= 1
    may_end = is_complete and end == len(ids) > 0 and ids[-1] in special_ids(tokenizer)
    if may_end and not _completes(ids, tokenizer, stop):
        end -= 1
    return list(ids[:end])


def text_of_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text with special tokens; the first time that there are some, the log names one."""
    special = special_ids(tokenizer).intersection(ids)
    if special and not _MENTIONED:
        _MENTIONED.add(str(tokenizer.convert_ids_to_tokens(min(special))))
        logger.info(
            "responses have special tokens, such as %r: rewards read them as text", *_MENTIONED
        )
    return decoded(ids, tokenizer)


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of token ids; special tokens stand in it without blanks around them."""
    return str(tokenizer.decode(list(ids), spaces_between_special_tokens=False))


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all tokens that the tokenizer declares as special, also those without a name."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def _completes(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> bool:
    """Test for a last token that completes one of the texts, as engines test it."""
    if not stop:
        return False
    before, after = decoded(ids[:-1], tokenizer), decoded(ids, tokenizer)
    return any(after.count(text) > before.count(text) for text in stop)
