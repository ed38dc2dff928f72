"""A cache of pages, bounded by bytes; what was not used for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PageCache(Generic[K, V]):
    """Least recently used pages give way. Used from one thread.

    Args:
        capacity: in bytes; a page larger than it is never kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.evicted = 0
        self._pages: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: K) -> bool:
        return key in self._pages

    def get(self, key: K) -> V | None:
        """The page, which is then the most recently used."""
        found = self._pages.get(key)
        if found is None:
            return None
        self._pages.move_to_end(key)
        return found[0]

    def touch(self, keys: Sequence[K]) -> None:
        """Mark a chain's pages as used, so that its end goes before its beginning, without which it is useless."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    def put(self, key: K, page: V, size: int) -> None:
        """Keep a page of ``size`` bytes, if it fits at all."""
        old = self._pages.pop(key, None)
        if old is not None:
            self.used -= old[1]
        if size > self.capacity:
            return
        self._pages[key] = (page, size)
        self.used += size
        while self.used > self.capacity:
            _, (_, freed) = self._pages.popitem(last=False)
            self.used -= freed
            self.evicted += 1
