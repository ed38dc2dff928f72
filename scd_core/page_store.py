"""The pages of a live paged cache, read and written from outside. With paged.py, the only file that knows how
transformers' continuous batching works inside (the minor version is pinned in pyproject).

What is relied on, each pinned by a test in tests/scd_core/test_paged.py:

- ``manager.pause()`` holds the generation thread between two steps, so that cache and ledger can be changed.
- A cached prefix page is a *block* whose chained hash the ledger knows and that no request owns. To make one:
  allocate blocks to an invented request, write keys and values at its write indices into each layer's token views,
  ``mark_complete_blocks``, free the request. ``add_request`` then finds the blocks and prefills only the rest.
- Only models whose layers all attend fully share blocks. With sliding windows nothing can be seeded.

Convention: ``[L, T, C]`` as everywhere, but keys are rotated here, as the cache holds them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from scd_core.errors import EngineStoppedError, NonFiniteError

NATIVE = "native-"
"""Requests of such names neither read shared pages nor leave any."""


class PageStore:
    """Prefix pages of one running manager's cache.

    Args:
        manager: a ``ContinuousBatchingManager`` whose thread runs.
        margin: share of the cache that is left free. The scheduler drops *all* cached pages when less is free.
    """

    def __init__(self, manager: Any, page_size: int, margin: float) -> None:
        self._manager = manager
        self._cache: Any = None
        self._names = count()
        self._lock = threading.Lock()
        self._margin = margin
        self.page_size = page_size
        with self.paused():  # the thread has made its cache by the time that it can pause
            self._cache = manager.batch_processor.cache
            _keep_native_apart(self._cache)
        self._allocators: list[Any] = list(self._cache.cache_allocators.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the generation thread between two steps. EngineStoppedError when it has ended."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._manager.pause())
            except RuntimeError as error:
                raise EngineStoppedError(f"the generation thread has ended: {error.__cause__ or error}") from error
            yield

    @property
    def shares(self) -> bool:
        """Whether prefixes are cached at all: not with sliding windows."""
        return bool(self._cache.use_prefix_sharing) and len(self._allocators) == 1

    @property
    def total(self) -> int:
        """Pages of the whole cache, counted for the kind of layer that gets fewest."""
        return int(self._cache.num_sectors) * min(allocator.blocks_per_sector for allocator in self._allocators)

    @property
    def free(self) -> int:
        """Pages that nobody owns and that hold nothing."""
        pool = self._cache.pool
        return min(
            pool.num_free_sectors * allocator.blocks_per_sector + pool.count_free_blocks(allocator.index)
            for allocator in self._allocators
        )

    @property
    def cached(self) -> int:
        """Pages that nobody owns and that hold a reusable prefix."""
        return sum(len(allocator.ledger.cached_blocks) for allocator in self._allocators)

    def matching(self, token_ids: Sequence[int]) -> int:
        """How many leading pages of ``token_ids`` are cached now. Reads only, without holding the thread."""
        return len(self._match(token_ids)) if self.shares else 0

    def write(self, token_ids: Sequence[int], first_token: int, keys: Tensor, values: Tensor) -> int:
        """Write pages for the tokens from ``first_token`` on, and leave them in the cache.

        Pages that are cached already stay as they are. When room is short the oldest cached pages give way; if
        that is not enough, only leading pages are written. Nothing is hashed before all of it is written.

        Args:
            token_ids: the whole prefix; it ends with a page.
            keys, values: ``[L, T, C]``, rotated keys.

        Returns the pages written: 0 when all are there, those before ``first_token`` are not, or without room.
        """
        if not self.shares:
            return 0
        allocator = self._allocators[0]
        stored = [self._as_cached(tensor, allocator) for tensor in (keys, values)]
        wanted = len(token_ids) // self.page_size
        with (
            self._lock,
            self.paused(),
            torch.no_grad(),
            self._invented_request(allocator, token_ids) as (name, have),
        ):
            start = have * self.page_size
            if start < first_token or have == wanted:
                return 0
            pages = self._make_room(allocator, wanted - have)
            if not pages:
                return 0
            tokens = pages * self.page_size
            allocator.allocate_cache_to_request(name, start, tokens)
            index = torch.tensor(allocator.get_write_indices(name, start, tokens), device=self._cache.device)
            part = slice(start - first_token, start - first_token + tokens)
            for row, layer in enumerate(sorted(allocator.layer_indices)):
                for view, source in zip(allocator._kv_token_views[layer], stored, strict=True):
                    view.index_copy_(0, index, source[row, part])
            self._synchronise()
            allocator.mark_complete_blocks(name, list(token_ids[: start + tokens]), pages)
            return pages

    def forget(self, token_ids: Sequence[int]) -> None:
        """Take the cached leading pages out of use: no request finds them again. Those that own them keep them."""
        if not self.shares:
            return
        allocator = self._allocators[0]
        with self._lock, self.paused():
            self._evict(allocator, self._match(token_ids))

    def read(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[L, T, C]`` of the cached leading pages: for audits and tests."""
        allocator = self._allocators[0]
        with (
            self._lock,
            self.paused(),
            torch.no_grad(),
            self._invented_request(allocator, token_ids) as (name, have),
        ):
            indices = allocator.get_read_indices(name, have * self.page_size, 0) if have else []
            index = torch.tensor(indices, dtype=torch.long, device=self._cache.device)
            views = [allocator._kv_token_views[layer] for layer in sorted(allocator.layer_indices)]
            keys = torch.stack([key.index_select(0, index).flatten(1) for key, _ in views])
            values = torch.stack([value.index_select(0, index).flatten(1) for _, value in views])
            self._synchronise()
            return keys, values

    @contextmanager
    def _invented_request(self, allocator: Any, token_ids: Sequence[int]) -> Iterator[tuple[str, int]]:
        """A request that owns the cached leading pages, and its number of them; freed in any case."""
        name = f"pages-{next(self._names)}"
        blocks = self._match(token_ids)
        if blocks:
            allocator.acquire_prefix_blocks(name, len(blocks) * self.page_size, blocks)
        try:
            yield name, len(blocks)
        finally:
            allocator.free_blocks(name)  # a block without a hash returns to the pool, one with a hash stays cached

    def _match(self, token_ids: Sequence[int]) -> list[int]:
        # the library never matches a prompt's last token, so that one is left to prefill: hence one more
        blocks: list[int] = self._allocators[0].match_prefix_blocks([*token_ids, 0])
        return blocks

    def _as_cached(self, tensor: Tensor, allocator: Any) -> Tensor:
        """``[L, T, C]`` -> ``[L, T, kv_heads, head_dim]`` in the cache's type, where all of it must be finite."""
        stored = tensor.to(self._cache.device, allocator.cache_dtype)
        if not bool(stored.isfinite().all()):
            raise NonFiniteError(f"keys or values to be cached hold NaN or infinity as {allocator.cache_dtype}")
        return stored.reshape(*tensor.shape[:2], allocator.num_key_value_heads, allocator.head_dim)

    def _make_room(self, allocator: Any, wanted: int) -> int:
        """How many of the wanted pages can be had while the margin stays free; evicts the oldest cached ones."""
        pool, ledger = self._cache.pool, allocator.ledger
        reserve = math.ceil(self._margin * self.total)
        room = min(wanted, self.free + len(ledger.cached_blocks) - reserve)
        if room <= 0:
            return 0
        self._evict(allocator, list(ledger.cached_blocks)[: max(0, room + reserve - self.free)])
        while pool.count_free_blocks(allocator.index) < room:
            pool.allocate_sector(allocator.index)
        return room

    def _evict(self, allocator: Any, blocks: list[int]) -> None:
        """Remove the blocks' hashes; what no request owns returns to the pool now, the rest when it is freed."""
        ledger = allocator.ledger
        unowned = [block for block in blocks if block in ledger.cached_blocks]
        for block in blocks:
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        for block in unowned:
            del ledger.cached_blocks[block]
        self._cache.pool.free_blocks(allocator.index, unowned)

    def _synchronise(self) -> None:
        if self._cache.device.type != "cpu":  # the generation thread has a stream of its own
            torch.accelerator.synchronize()


def _keep_native_apart(cache: Any) -> None:
    """Both ways to a shared page are closed: the search at the start, and the exchange of a completed page for an
    equal one, which hashes bring about in the midst of a prompt."""
    search, complete = cache.search_prefix_match, cache.count_new_complete_blocks

    def search_prefix_match(name: str, token_ids: list[int]) -> int:
        return 0 if name.startswith(NATIVE) else int(search(name, token_ids))

    def count_new_complete_blocks(state: Any, tokens: int) -> dict[str, int]:
        return {} if state.request_id.startswith(NATIVE) else dict(complete(state, tokens))

    cache.search_prefix_match, cache.count_new_complete_blocks = search_prefix_match, count_new_complete_blocks
