"""Every transport does the same: from one process to another, whole or with a named error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from deployments.ticket import Ticket
from deployments.transport import TRANSPORTS, open_transport
from scd_core.errors import TransportError

PAGES = [b"a", os.urandom(70_000), b"last"]
TIMEOUT_S = 60.0

nixl = pytest.mark.skipif(
    find_spec("nixl") is None or not os.environ.get("SCD_TEST_NIXL"),
    reason="its agents keep whole cores busy: set SCD_TEST_NIXL=1 where it is installed",
)


def ticket_of(transport: str, parcel: Any, pages: list[bytes]) -> Ticket:
    return Ticket("p", "e", 0, tuple(map(len, pages)), transport, parcel, "lease", 30.0)


class Publisher:
    """Another process."""

    def __init__(self, transport: str) -> None:
        self.transport = open_transport(transport)

    async def publish(self, pages: list[bytes]) -> Ticket:
        return ticket_of(self.transport.name, await self.transport.publish(pages), pages)


def start(transport: str) -> Any:
    """An actor that publishes by the transport."""
    import ray

    options: dict[str, Any] = {"num_cpus": 0.1}
    if transport == "nixl":
        options["enable_tensor_transport"] = True
    return ray.remote(Publisher).options(**options).remote(transport)


@pytest.fixture(scope="module", params=["inline", "object_store", pytest.param("nixl", marks=nixl)])
def publisher(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[tuple[str, Any]]:
    """The transport's name, and an actor that publishes by it."""
    import ray

    actor = start(request.param)
    yield request.param, actor
    ray.kill(actor)


@pytest.mark.anyio
class TestTransport:
    async def test_pages_arrive(self, publisher: tuple[str, Any]) -> None:
        import ray

        name, actor = publisher
        ticket = ray.get(actor.publish.remote(PAGES), timeout=TIMEOUT_S)
        pages = await open_transport(name).fetch(ticket, TIMEOUT_S)
        assert [bytes(p) for p in pages] == PAGES

    async def test_sizes_that_do_not_fit(self, publisher: tuple[str, Any]) -> None:
        """A ticket that promises other pages than arrive is refused before anything is read."""
        import ray

        name, actor = publisher
        ticket = ray.get(actor.publish.remote(PAGES), timeout=TIMEOUT_S)
        with pytest.raises(TransportError, match="bytes arrived"):
            await open_transport(name).fetch(ticket_of(name, ticket.parcel, [b"x"]), TIMEOUT_S)

    async def test_a_parcel_of_another_transport(self, publisher: tuple[str, Any]) -> None:
        name, _ = publisher
        with pytest.raises(TransportError):
            await open_transport(name).fetch(ticket_of(name, {"url": "http://elsewhere"}, PAGES), TIMEOUT_S)

    async def test_a_producer_that_died(self, publisher: tuple[str, Any]) -> None:
        """Whoever holds a ticket is told in time, or gets the very pages (they may lie on its own node)."""
        import ray

        name, _ = publisher
        actor = start(name)
        ticket = ray.get(actor.publish.remote(PAGES), timeout=TIMEOUT_S)
        ray.kill(actor)
        try:
            pages = await open_transport(name).fetch(ticket, 20.0)
        except (TransportError, TimeoutError):
            assert name != "inline"
        else:
            assert [bytes(p) for p in pages] == PAGES


def test_unknown_transport() -> None:
    assert "pigeon" not in TRANSPORTS
    with pytest.raises(ValueError, match="none of"):
        open_transport("pigeon")


def test_nixl_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional package the error says how to get it."""
    monkeypatch.setattr("deployments.transport.nixl.find_spec", lambda name: None)
    with pytest.raises(TransportError, match="pip install"):
        open_transport("nixl")
