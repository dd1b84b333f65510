"""The least number of tokens of a text, from its length: cheap to know before a text is tokenized."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
"""Pre-tokenizers that keep each character of a text, unless they are told to remove some."""
_MOST_COMPOSED = 4
"""Characters that NFC makes one of, at most."""
BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


@dataclass(frozen=True)
class TextBound:
    """A token stands for at most ``longest`` characters of a text.

    ``composes``: NFC comes first. ``strips``: blanks around some special tokens are part of these, any number of them.
    """

    longest: int
    composes: bool = False
    strips: bool = False

    def least_tokens(self, text: str) -> int:
        """Tokens that ``text`` has at least."""
        n_characters = len(text)
        if self.composes:
            n_ascii = len(
                text.encode("ascii", "ignore")
            )  # none of them is composed with one before it
            n_characters = max(n_ascii, n_characters // _MOST_COMPOSED)
        if self.strips:
            n_characters -= sum(map(text.count, BLANKS))
        return -(-n_characters // self.longest)


def text_bound(tokenizer: PreTrainedTokenizerBase) -> TextBound | None:
    """The bound of a tokenizer; None if it has none.

    BPE of bytes, as of Llama 3 and Qwen, has one, and BPE that falls back to bytes, as of Llama 2 and Mistral. Where a
    token may stand for unknown text of any length (WordPiece, Unigram) or text may be dropped, nothing is known.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    core, vocabulary = tokenizer.backend_tokenizer, tokenizer.get_vocab()
    splitting, normalizing = _steps(core.pre_tokenizer), _steps(core.normalizer)
    if (
        not isinstance(core.model, BPE)
        or not all(map(_keeps, splitting))
        or not all(map(_keeps_length, normalizing))
    ):
        return None
    is_of_bytes = any(step["type"] == "ByteLevel" for step in splitting)
    units = ByteLevel.alphabet() if is_of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    if not (is_of_bytes or core.model.byte_fallback) or not vocabulary.keys() >= set(units):
        return None
    return TextBound(
        longest=max(map(len, vocabulary)),
        composes=any(step["type"] == "NFC" for step in normalizing),
        strips=any(
            token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()
        ),
    )


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all characters."""
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter; NFC does, within a bound."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")  # else a regular expression
        return bool(pattern) and len(pattern) <= len(step["content"])
    return step["type"] in ("NFC", "Prepend")


def _steps(part: Any) -> list[dict[str, Any]]:
    """Steps of a normalizer or pre-tokenizer, in the form of tokenizer.json."""
    if part is None:
        return []
    step: dict[str, Any] = json.loads(part.__getstate__())
    inner: list[dict[str, Any]] | None = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else inner
