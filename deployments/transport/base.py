"""The interface of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.ticket import Ticket

Page = bytes | memoryview


class Transport(Protocol):
    """Moves pages of bytes. A producer publishes, a specialist fetches; both sides hold one of the same name."""

    name: str

    async def publish(self, pages: Sequence[bytes]) -> Any:
        """Make pages fetchable.

        Returns:
            The parcel for the ticket. What it names stays fetchable as long as the producer keeps it.

        Raises:
            TransportError: there is no room for them.
        """

    async def fetch(self, ticket: Ticket, timeout_s: float) -> list[Page]:
        """The pages of a ticket, in order; unchecked, but of the sizes that the ticket names.

        Raises:
            TransportError: they cannot be had.
            ProducerUnavailableError: because their producer is gone.
            TimeoutError: not within ``timeout_s``.
        """
