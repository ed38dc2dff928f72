"""Pages inside the ticket itself: for small ones, and for one process."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.ticket import Ticket, join_pages, split_pages
from deployments.transport.base import Page
from scd_core.errors import TransportError


class InlineTransport:
    """The parcel is the bytes."""

    name = "inline"

    async def publish(self, pages: Sequence[bytes]) -> bytes:
        return join_pages(pages)[0]

    async def fetch(self, ticket: Ticket, timeout_s: float) -> list[Page]:
        if not isinstance(ticket.parcel, bytes):
            raise TransportError(f"an inline parcel is bytes, not {type(ticket.parcel).__name__}")
        return list(split_pages(memoryview(ticket.parcel), ticket.sizes))
