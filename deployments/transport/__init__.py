"""How codes move from a producer to a specialist. Nothing outside this package knows."""

from __future__ import annotations

from deployments.transport.base import Transport
from deployments.transport.inline import InlineTransport

TRANSPORTS = ("inline", "object_store", "nixl")

__all__ = ["TRANSPORTS", "InlineTransport", "Transport", "open_transport"]


def open_transport(name: str) -> Transport:
    """The transport of that name. Its package is imported, and its agent started, only where it is chosen.

    Raises:
        ValueError: there is no such transport.
        TransportError: it cannot be used here.
    """
    if name == "inline":
        return InlineTransport()
    if name == "object_store":
        from deployments.transport.object_store import ObjectStoreTransport

        return ObjectStoreTransport()
    if name == "nixl":
        from deployments.transport.nixl import NixlTransport

        return NixlTransport()
    raise ValueError(f"transport {name!r} is none of {', '.join(TRANSPORTS)}")
