"""The queue of requests that wait for a row."""

from collections.abc import Callable

from openppo.rollout.requests import Request

_ROOM_TO_REFILL = (
    1 / 8
)  # share of the rows that must be free before waiting requests interrupt the others


class Queue(list[Request]):
    """Requests that wait for a row."""

    _filling = False

    def take(
        self, running: int, rows: int, n_kept: Callable[[Request], int], most: int
    ) -> list[Request]:
        """Take out the first, as many as one forward should read; none if too few rows are free to interrupt others.

        ``running`` counts the taken ``rows``. ``n_kept`` tells how many of a prompt's tokens need not be read; equal
        prompts are read once. ``most`` tokens are read.
        """
        free = rows - running
        enough = 1 if self._filling else max(1, _ROOM_TO_REFILL * rows)
        self._filling = free >= min(len(self), enough) > 0
        n_taken, width = 0, 0
        prompts: set[tuple[int, ...]] = set()
        for request in self[:free] if self._filling else ():
            request.n_kept = n_kept(request)
            length = request.n_unread
            n_tokens = len(prompts | {request.known_ids}) * max(width, length)
            wasteful = len(prompts) * width > most / 4 and not 0.8 * width < length <= width
            if n_taken > 0 and (n_tokens > most or wasteful):
                break
            prompts.add(request.known_ids)
            width = max(width, length)
            n_taken += 1
        taken = self[:n_taken]
        del self[:n_taken]
        return taken
