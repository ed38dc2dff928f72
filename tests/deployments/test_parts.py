"""Tickets, leases, page caches, flights and settings by themselves."""

from __future__ import annotations

import asyncio
import time

import pytest

from deployments.config import PoolSettings, ProducerSettings, SpecialistSettings
from deployments.fallback import UNEXPECTED, reason_of
from deployments.flight import Flights
from deployments.leases import LeaseBook
from deployments.page_cache import PageCache
from deployments.registrar import cause_of
from deployments.ticket import Ticket, join_pages, split_pages
from scd_core import errors


class TestTicket:
    def test_pages_come_back(self) -> None:
        pages = [b"a", b"bcd", b"ef"]
        buffer, sizes = join_pages(pages)
        assert [bytes(p) for p in split_pages(memoryview(buffer), sizes)] == pages

    def test_a_buffer_of_another_length(self) -> None:
        with pytest.raises(errors.TransportError, match="3 bytes"):
            split_pages(memoryview(b"abc"), (2, 2))

    def test_age(self) -> None:
        ticket = Ticket("p", "e", 0, (1,), "inline", b"x", "l", lease_s=1000.0)
        ticket.check_age(time.monotonic())
        with pytest.raises(errors.TicketExpiredError):
            ticket.check_age(time.monotonic() - 1000)


class TestLeases:
    def test_life(self) -> None:
        """A parcel is held beyond the lease for a fetch under way, and not for ever."""
        now = [0.0]
        book = LeaseBook(10, grace=1.5, clock=lambda: now[0])
        first = book.grant("a")
        now[0] = 9.0
        second = book.grant("b")
        now[0] = 14.9
        assert book.sweep() == 0
        assert book.release(second)
        assert not book.release(second)
        now[0] = 15.0
        assert book.sweep() == 1
        assert len(book) == 0
        assert not book.release(first)


class TestPageCache:
    def test_the_least_used_goes(self) -> None:
        cache: PageCache[str, int] = PageCache(30)
        for key in "abc":
            cache.put(key, 0, 10)
        cache.get("a")
        cache.put("d", 0, 10)
        assert [key in cache for key in "abcd"] == [True, False, True, True]
        assert cache.used == 30

    def test_the_end_of_a_chain_goes_before_its_beginning(self) -> None:
        """Without its first page a prefix is lost, without its last it is one page shorter."""
        cache: PageCache[str, int] = PageCache(30)
        for key in "abc":
            cache.put(key, 0, 10)
        cache.touch("abc")
        cache.put("x", 0, 10)
        assert [key in cache for key in "abcx"] == [True, True, False, True]

    def test_replacing_and_too_large(self) -> None:
        cache: PageCache[str, int] = PageCache(30)
        cache.put("a", 1, 10)
        cache.put("a", 2, 20)
        assert (cache.get("a"), cache.used) == (2, 20)
        cache.put("b", 3, 31)
        assert "b" not in cache
        assert cache.used == 20


@pytest.mark.anyio
async def test_flights_let_go_page_by_page() -> None:
    flights = Flights()
    assert not await flights.wait(b"1")
    with flights.claim([b"1", b"2"]) as claim:
        waiting = asyncio.create_task(flights.wait(b"1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        claim.land(b"1")
        assert await waiting
        assert not await flights.wait(b"1")
        still = asyncio.create_task(flights.wait(b"2"))
        await asyncio.sleep(0)
    assert await still
    assert len(flights) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: PoolSettings("r", transport="pigeon"),
        lambda: PoolSettings("r", threads=0),
        lambda: ProducerSettings(lease_s=0),
        lambda: ProducerSettings(chunk=0),
        lambda: SpecialistSettings(min_pages=0),
        lambda: SpecialistSettings(deadline_s=-1),
    ],
)
def test_settings_refuse(make: object) -> None:
    with pytest.raises(ValueError, match=r"at least|none of"):
        make()  # type: ignore[operator]


def test_every_fault_of_a_code_has_a_reason() -> None:
    """A kind of error that is added without a reason would be counted as unexpected."""
    kinds = [k for root in (errors.CodeError, errors.TransportError) for k in root.__subclasses__()]
    reasons = [reason_of(kind("x")) for kind in kinds]
    assert UNEXPECTED not in reasons
    assert len(set(reasons)) == len(kinds)


def test_cause_of_a_failed_start() -> None:
    message = (
        "The deployment failed to start.\nTraceback:\n  File x\nscd_core.errors.FingerprintError: other weights\n"
    )
    assert cause_of(message) == "scd_core.errors.FingerprintError: other weights"
    assert cause_of("") == ""
