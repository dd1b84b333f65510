"""Text of responses: without tokens that end or pad them, with every other special token."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.types import Sample

_MENTIONED = set[str]()
"""A special token that the log has named."""


def response_text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the last segment from its first action on; between several turns stands the environment's text.

    Token ids of "<reason>4</reason><eos>" give "<reason>4</reason>", though the tags are special tokens.
    """
    segment = sample.last
    start = segment.spans[0][0] if segment.spans else len(segment.token_ids)
    ids = written_ids(
        segment.token_ids[start:],
        tokenizer,
        is_complete=segment.finish_reason.is_complete,
        stop=sample.stop,
    )
    return text_of_ids(ids, tokenizer)


def written_spans(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each span of actions in the last segment, without those that end or pad it."""
    written = []
    segment = sample.last
    spans = segment.spans
    for number, (start, end) in enumerate(spans, 1):
        ids = segment.token_ids[start:end]
        # All spans but the last have ended.
        is_complete = number < len(spans) or segment.finish_reason.is_complete
        written.append(written_ids(ids, tokenizer, is_complete=is_complete, stop=sample.stop))
    return written


def written_ids(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_complete: bool,
    stop: Sequence[str] = (),
) -> list[int]:
    """Token ids without those at the end that only end or pad a response.

    These are EOS and PAD and, if ``is_complete``, another special token that ended a turn (``<|end|>`` of Phi-3), but
    not one that completes a text of ``stop``.
    """
    silent = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    end = len(ids)
    while end > 0 and ids[end - 1] in silent:
        end -= 1
    if is_complete and end == len(ids) and _ends_turn(ids, tokenizer, stop):
        end -= 1
    return list(ids[:end])


def text_of_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of token ids, with special tokens; one of the first that a run meets is logged."""
    special = special_ids(tokenizer).intersection(ids)
    if special and not _MENTIONED:
        _MENTIONED.add(str(tokenizer.convert_ids_to_tokens(min(special))))
        logger.info(
            "responses have special tokens, such as %r: rewards read them as text", *_MENTIONED
        )
    return decoded(ids, tokenizer)


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of token ids, with special tokens but without blanks around them."""
    return str(tokenizer.decode(list(ids), spaces_between_special_tokens=False))


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all tokens that the tokenizer declares as special, including those without a name."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def _ends_turn(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> bool:
    """True if the last token is special and completes no text of ``stop``."""
    if not ids or ids[-1] not in special_ids(tokenizer):
        return False
    return not _completes(ids, tokenizer, stop)


def _completes(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> bool:
    """True if the last token completes one of the texts of ``stop``, by the test of engines."""
    if not stop:
        return False
    before = decoded(ids[:-1], tokenizer)
    after = decoded(ids, tokenizer)
    return any(after.count(text) > before.count(text) for text in stop)
