"""Single flight over pages: of several who lack the same page, one makes it and the others wait.

Prompts that share a document and differ in the question share only their first pages, so the unit is the page,
named by the hash of all up to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Flights:
    """Who makes what now. Used from one event loop."""

    def __init__(self) -> None:
        self._flying: dict[bytes, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._flying)

    async def wait(self, page: bytes) -> bool:
        """Wait until nobody makes this page any more; False at once when nobody does.

        Whoever made it may have failed: look again, and make it then.
        """
        event = self._flying.get(page)
        if event is None:
            return False
        await event.wait()
        return True

    @contextmanager
    def claim(self, pages: Sequence[bytes]) -> Iterator[Claim]:
        """Make these pages; those who wait for one are let go when it has landed, or when this context ends."""
        claim = Claim(self._flying, pages)
        try:
            yield claim
        finally:
            for page in pages:
                claim.land(page)


class Claim:
    """The pages that one task makes."""

    def __init__(self, flying: dict[bytes, asyncio.Event], pages: Sequence[bytes]) -> None:
        self._flying = flying
        # a page that another makes already (its own first pages were evicted meanwhile) stays the other's
        self._own = {page: asyncio.Event() for page in pages if page not in flying}
        flying.update(self._own)

    def land(self, page: bytes) -> None:
        """Let those go who wait for this page."""
        event = self._own.pop(page, None)
        if event is not None:
            event.set()
            if self._flying.get(page) is event:
                del self._flying[page]
