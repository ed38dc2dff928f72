"""The ticket: what a producer hands to a specialist in place of the codes themselves.

Convention: a ticket is small and says everything that is needed to fetch and to check the pages, except the hashes
of the prefix, which the specialist computes from its own tokens and never takes from anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from scd_core.errors import TicketExpiredError, TransportError


@dataclass(frozen=True)
class Ticket:
    """Names published pages.

    Attributes:
        producer: fingerprint of the model that made them.
        encoder_digest: the encoder that made them.
        first_page: the prompt's page that the first of them covers.
        sizes: bytes of each page on the wire.
        transport: how they travel.
        parcel: the transport's own business: the bytes, or references to them.
        lease: names what the producer holds for the ticket.
        lease_s: so long it holds it, counted from before the pages were published.
        prefilled_tokens: how many tokens the producer had to prefill for it.
    """

    producer: str
    encoder_digest: str
    first_page: int
    sizes: tuple[int, ...]
    transport: str
    parcel: Any
    lease: str
    lease_s: float
    prefilled_tokens: int = 0

    def __post_init__(self) -> None:
        if self.first_page < 0 or any(size < 1 for size in self.sizes) or self.lease_s <= 0:
            raise ValueError(
                f"no ticket: first page {self.first_page}, sizes {self.sizes}, lease {self.lease_s} s"
            )

    @property
    def pages(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes of all pages together."""
        return sum(self.sizes)

    def check_age(self, asked_at: float) -> None:
        """Refuse a stale ticket.

        Args:
            asked_at: ``time.monotonic()`` when the ticket was asked for, by the asking process's own clock. That
                was before the lease began, so no clocks need to agree.

        Raises:
            TicketExpiredError: the lease may have ended.
        """
        age = time.monotonic() - asked_at
        if age >= self.lease_s:
            raise TicketExpiredError(f"the ticket is {age:.1f} s old, and its lease lasted {self.lease_s:.1f} s")


def join_pages(pages: Sequence[bytes]) -> tuple[bytes, tuple[int, ...]]:
    """Pages as one buffer, and the size of each."""
    return b"".join(pages), tuple(len(page) for page in pages)


def split_pages(buffer: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The inverse of ``join_pages``, without copying.

    Raises:
        TransportError: the buffer is not as long as the pages together.
    """
    if buffer.nbytes != sum(sizes):
        raise TransportError(f"{buffer.nbytes} bytes arrived, and the ticket names {sum(sizes)}")
    return list(_slices(buffer, sizes))


def _slices(buffer: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        yield buffer[stop - size : stop]
