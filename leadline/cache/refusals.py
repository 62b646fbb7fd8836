"""What requests that did not fit would need, so that no step looks them up again in vain."""

from __future__ import annotations

from leadline.core.request import Request


class Refusals:
    """Pages that each refused request needs at least, as long as that is known.

    A need shrinks only when more of the request's cached prefix is held by others. So a note is
    good until a page of its request's chain is newly found or newly held; then all notes go,
    since requests that wait together often share a prefix.
    """

    def __init__(self) -> None:
        self._needed: dict[str, int] = {}
        self._digests: set[bytes] = set()

    def note(self, request: Request, num_pages: int) -> None:
        """Remember that the request, just looked up, needs ``num_pages`` free ones."""
        self._needed[request.request_id] = num_pages
        self._digests.update(request.digests)

    def needed(self, request: Request) -> int:
        """What was noted; 0 when nothing is known."""
        return self._needed.get(request.request_id, 0)

    def drop(self, request: Request) -> None:
        """Forget a request that waits no longer."""
        if self._needed.pop(request.request_id, None) is not None and not self._needed:
            self._digests.clear()

    def prefix_grew(self, digest: bytes) -> None:
        """A hit can contain the page of ``digest`` from now on, or finds it held."""
        if digest in self._digests:
            self.clear()

    def clear(self) -> None:
        self._needed.clear()
        self._digests.clear()
