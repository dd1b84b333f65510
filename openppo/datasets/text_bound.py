"""Least number of tokens of a text, from its length: cheap before a text is tokenized."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
"""Pre-tokenizers that keep each character of a text, unless an option removes some."""
_MOST_COMPOSED = 4
"""Characters that NFC composes to one, at most."""
_WIDE_BLANKS = "".join(map(chr, range(0x2000, 0x200B)))
BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + _WIDE_BLANKS
"""Characters that some special tokens take in."""


@dataclass(frozen=True)
class TextBound:
    """Bound of a tokenizer: a token stands for at most ``longest`` characters of a text.

    ``composes``: NFC comes first. ``strips``: some special tokens take in any number of blanks around them.
    """

    longest: int
    composes: bool = False
    strips: bool = False

    def least_tokens(self, text: str) -> int:
        """Least number of tokens of ``text``.

        >>> TextBound(longest=4).least_tokens("ten letters")
        3
        """
        n_characters = len(text)
        if self.composes:
            # No ASCII character is composed with one before it.
            n_ascii = len(text.encode("ascii", "ignore"))
            n_characters = max(n_ascii, n_characters // _MOST_COMPOSED)
        if self.strips:
            n_characters -= sum(map(text.count, BLANKS))
        return -(-n_characters // self.longest)


def text_bound(tokenizer: PreTrainedTokenizerBase) -> TextBound | None:
    """Bound of a tokenizer; None if it has none.

    BPE of bytes, as in Llama 3 and Qwen, has one, and BPE that falls back to bytes, as in Llama 2 and Mistral. If a
    token may stand for unknown text of any length (WordPiece, Unigram), or text may be dropped, there is none.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    core = tokenizer.backend_tokenizer
    splitting = _steps(core.pre_tokenizer)
    normalizing = _steps(core.normalizer)
    keeps_text = all(map(_keeps, splitting)) and all(map(_keeps_length, normalizing))
    if not isinstance(core.model, BPE) or not keeps_text:
        return None

    if any(step["type"] == "ByteLevel" for step in splitting):
        units = ByteLevel.alphabet()
    elif core.model.byte_fallback:
        units = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() >= set(units):
        return None

    added = tokenizer.added_tokens_decoder.values()
    return TextBound(
        longest=max(map(len, vocabulary)),
        composes=any(step["type"] == "NFC" for step in normalizing),
        strips=any(token.lstrip or token.rstrip for token in added),
    )


def _keeps(step: dict[str, Any]) -> bool:
    """True if a pre-tokenizer keeps all characters."""
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _keeps_length(step: dict[str, Any]) -> bool:
    """True if a normalizer makes no text shorter, but for NFC, which has a bound."""
    if step["type"] == "Replace":
        # Without it the pattern is a regular expression.
        pattern = step["pattern"].get("String")
        return bool(pattern) and len(pattern) <= len(step["content"])
    return step["type"] in ("NFC", "Prepend")


def _steps(part: Any) -> list[dict[str, Any]]:
    """List the steps of a normalizer or pre-tokenizer, in the form of tokenizer.json."""
    if part is None:
        return []
    step: dict[str, Any] = json.loads(part.__getstate__())
    inner: list[dict[str, Any]] | None = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else inner
