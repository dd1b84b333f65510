"""Text of sampled tokens, as they come."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
"""Stand-in of decoders for a character of which bytes are missing."""


class TextStream:
    """Pieces of a text whose tokens arrive one by one; joined, they are the whole text.

    A character waits for all of its bytes, and what may become one of ``stop`` waits for the tokens after it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode = decode
        self.stop = stop
        self.written = ""

    def piece(self, token_ids: Sequence[int]) -> str:
        """Return the text after the pieces so far; ``token_ids`` are all that were sampled."""
        text = self.decode(token_ids).rstrip(_INCOMPLETE)
        return self._after(text[: len(text) - self._n_held(text)])

    def end(self, text: str) -> str:
        """Return the end of the whole ``text``, after the pieces so far."""
        return self._after(text)

    def _after(self, text: str) -> str:
        # A decoder takes back a character only where the bytes after it are no text.
        if not text.startswith(self.written):
            return ""
        new = text[len(self.written) :]
        self.written = text
        return new

    def _n_held(self, text: str) -> int:
        """Number of last characters with which one of ``stop`` begins."""
        longest = 0
        for stop in self.stop:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest
