"""Totals that say what a process did, readable at any time."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named totals; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._totals[name]

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
