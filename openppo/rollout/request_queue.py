"""The queue of requests that wait for a row."""

from collections.abc import Callable

from openppo.rollout.requests import Request

_ROOM_TO_REFILL = 1 / 8
"""Share of the rows that must be free before a prefill interrupts the rows that decode."""


class Queue(list[Request]):
    """Requests that wait for a row."""

    _filling = False

    def take(
        self, running: int, rows: int, n_kept: Callable[[Request], int], most: int
    ) -> list[Request]:
        """Pop the requests of the next prefill; none while too few rows are free to justify one.

        ``running`` of the ``rows`` are in use. ``n_kept`` returns how many tokens of a prompt need not be read; equal
        prompts are read once. The prefill reads at most ``most`` tokens, padding included.
        """
        free = rows - running
        enough = 1 if self._filling else max(1, _ROOM_TO_REFILL * rows)
        self._filling = free >= min(len(self), enough) > 0
        if not self._filling:
            return []

        n_taken = 0
        width = 0
        prompts: set[tuple[int, ...]] = set()
        for request in self[:free]:
            request.reuse(n_kept(request))
            length = request.n_unread
            n_tokens = len(prompts | {request.known_ids}) * max(width, length)
            is_full = n_tokens > most
            is_similar = 0.8 * width < length <= width
            is_wasteful = len(prompts) * width > most / 4 and not is_similar
            if n_taken > 0 and (is_full or is_wasteful):
                break

            prompts.add(request.known_ids)
            width = max(width, length)
            n_taken += 1

        entering = self[:n_taken]
        del self[:n_taken]
        return entering
