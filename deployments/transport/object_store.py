"""Pages through Ray's object store: one object per ticket, read without copying on the same node.

The reference travels nested in a list: Ray would resolve a bare one before the call, in the wrong place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OwnerDiedError, RayError

from deployments.ticket import Ticket, join_pages, split_pages
from deployments.transport.base import Page
from scd_core.errors import ProducerUnavailableError, TransportError


class ObjectStoreTransport:
    """The parcel is a list with one reference to an array of bytes."""

    name = "object_store"

    async def publish(self, pages: Sequence[bytes]) -> list[Any]:
        # an array, not bytes: Ray stores its buffer as it is, and readers map it
        array = np.frombuffer(join_pages(pages)[0], dtype=np.uint8)
        try:
            return [await asyncio.to_thread(self._put, array)]
        except ObjectStoreFullError as error:
            raise TransportError(f"the object store has no room for {array.nbytes} bytes") from error

    @staticmethod
    def _put(array: Any) -> Any:
        return ray.put(array)

    async def fetch(self, ticket: Ticket, timeout_s: float) -> list[Page]:
        array = await get_in_thread(ticket.parcel, timeout_s)
        return list(split_pages(memoryview(array).cast("B"), ticket.sizes))


async def get_in_thread(parcel: Any, timeout_s: float) -> Any:
    """The one object that a parcel refers to, with Ray's errors as ours."""
    if not isinstance(parcel, list) or len(parcel) != 1 or not isinstance(parcel[0], ray.ObjectRef):
        raise TransportError("the parcel is not a list of one object reference")
    try:
        return await asyncio.to_thread(ray.get, parcel[0], timeout=max(timeout_s, 0.0))
    except GetTimeoutError as error:
        raise TimeoutError(f"the codes did not arrive within {timeout_s:.1f} s") from error
    except OwnerDiedError as error:
        raise ProducerUnavailableError("the producer went before its codes were fetched") from error
    except RayError as error:
        raise TransportError(f"the codes cannot be fetched: {type(error).__name__}: {error}") from error
