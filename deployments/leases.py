"""What a producer holds for tickets that are not yet redeemed, and for how long."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from uuid import uuid4


class LeaseBook:
    """Keeps published parcels alive until they are released or their lease ends.

    Used from one thread. All leases last equally long, so the oldest ends first.

    Args:
        lease_s: how long a lease lasts.
        grace: the parcel is held for this many times as long, so that a fetch that began in time can end.
        clock: seconds, monotonic.
    """

    def __init__(self, lease_s: float, grace: float = 1.5, clock: Callable[[], float] = time.monotonic) -> None:
        if lease_s <= 0 or grace < 1:
            raise ValueError(f"lease_s {lease_s} must be positive, grace {grace} at least 1")
        self.lease_s = lease_s
        self._held: OrderedDict[str, tuple[float, Any]] = OrderedDict()
        self._grace = grace
        self._clock = clock
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, parcel: Any) -> str:
        """Hold a parcel; returns the lease's name."""
        lease = uuid4().hex
        self._held[lease] = (self._clock() + self._grace * self.lease_s, parcel)
        return lease

    def release(self, lease: str) -> bool:
        """Let go of a parcel; False when it is not held."""
        return self._held.pop(lease, None) is not None

    def sweep(self) -> int:
        """Let go of every parcel whose time has come; returns how many."""
        now, ended = self._clock(), 0
        while self._held and next(iter(self._held.values()))[0] <= now:
            self._held.popitem(last=False)
            ended += 1
        self.expired += ended
        return ended
