"""The producer: prefills a prefix once, encodes it once, and publishes its codes for any specialist.

It keeps its own content keys and values by page, so that a longer prompt continues where a shorter one ended, and
finished codes by encoder and page. All computing happens in one thread of its own, a chunk at a time, so that
requests take turns and the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from deployments.config import ProducerSettings
from deployments.counters import Counters
from deployments.flight import Flights
from deployments.leases import LeaseBook
from deployments.page_cache import PageCache
from deployments.ticket import Ticket
from deployments.transport import Transport
from scd_core.capture import ContentKV, StateChunk, capture
from scd_core.codec import Encoder
from scd_core.errors import ContextLengthError, PromptError
from scd_core.huggingface import LoadedModel
from scd_core.packing import Packer
from scd_core.pages import page_hashes
from scd_core.wire import CodePage, write_page

R = TypeVar("R")


@dataclass(frozen=True)
class _Coder:
    """An encoder, and the packer of its codes."""

    encoder: Encoder
    packer: Packer

    def pages(self, chunk: StateChunk, hashes: Sequence[bytes]) -> list[bytes]:
        """A chunk of whole pages on the wire.

        Args:
            hashes: of all pages of the prompt.
        """
        size = self.encoder.page_size
        first, digest = chunk.start // size, bytes.fromhex(self.encoder.digest)
        codes = self.encoder.encode(chunk).cpu().split(size)
        return [
            write_page(CodePage(digest, hashes[first + i], first + i, size, page), self.packer)
            for i, page in enumerate(codes)
        ]


class Producer:
    """Serves codes of one model.

    Args:
        load_encoder: gives the encoder of a digest, or raises ArtefactError.
        transport: publishes the codes.
    """

    def __init__(
        self,
        model: LoadedModel,
        load_encoder: Callable[[str], Encoder],
        settings: ProducerSettings,
        transport: Transport,
    ) -> None:
        self.model = model
        self._load_encoder = load_encoder
        self._settings = settings
        self._transport = transport
        self._coders: dict[str, _Coder] = {}
        self._content: PageCache[bytes, StateChunk] = PageCache(settings.content_bytes)
        self._codes: PageCache[tuple[str, bytes], bytes] = PageCache(settings.code_bytes)
        self._flights = Flights()
        self._leases = LeaseBook(settings.lease_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scd-producer")
        self.counters = Counters()

    async def prepare(self, token_ids: Sequence[int], encoder_digest: str, first_page: int, pages: int) -> Ticket:
        """Publish the codes of pages ``first_page`` to ``first_page + pages`` of a prompt.

        Args:
            token_ids: the prompt from its first token on, at least to the end of the last page.

        Raises:
            PromptError: the pages are not pages of these tokens, or a token is unknown.
            ContextLengthError: the prefix is longer than this model can read.
            ArtefactError: the encoder is not there, or not intact.
            TransportError: there is no room to publish them.
        """
        self.counters.add("requests")
        coder = await self._coder(encoder_digest)
        size = coder.encoder.page_size
        ids = list(token_ids[: (first_page + pages) * size])
        self._check(ids, size, first_page, pages)
        made = _Order(coder, ids, page_hashes(ids, size), range(first_page, first_page + pages))
        await self._fill(made)
        published = [made.found[i] for i in made.wanted]
        parcel = await self._transport.publish(published)
        lease = self._leases.grant(parcel)
        asyncio.get_running_loop().call_later(2 * self._settings.lease_s, self._leases.sweep)
        self.counters.add("pages_published", pages)
        self.counters.add("bytes_published", sum(map(len, published)))
        return Ticket(
            producer=self.model.signature.fingerprint,
            encoder_digest=encoder_digest,
            first_page=first_page,
            sizes=tuple(map(len, published)),
            transport=self._transport.name,
            parcel=parcel,
            lease=lease,
            lease_s=self._settings.lease_s,
            prefilled_tokens=made.prefilled,
        )

    def release(self, lease: str) -> None:
        """Let go of what a ticket names; it has been fetched."""
        self._leases.release(lease)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and gauges."""
        gauges = {
            "leases": len(self._leases),
            "leases_expired": self._leases.expired,
            "content_pages": len(self._content),
            "content_bytes": self._content.used,
            "code_pages": len(self._codes),
            "code_bytes": self._codes.used,
            "in_flight_pages": len(self._flights),
        }
        names = ("requests", "tokens_prefilled", "prefixes_prefilled", "prefixes_extended", "pages_encoded")
        totals = dict.fromkeys((*names, "code_hits", "pages_published", "bytes_published"), 0)
        return {**totals, **self.counters.as_dict(), **gauges}

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ----------------------------------------------------------------------------------------------- internals

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _coder(self, digest: str) -> _Coder:
        if digest not in self._coders:
            encoder = await asyncio.to_thread(self._load_encoder, digest)
            self._coders[digest] = _Coder(encoder, Packer.of(encoder))
        return self._coders[digest]

    def _check(self, ids: Sequence[int], size: int, first_page: int, pages: int) -> None:
        if first_page < 0 or pages < 1 or len(ids) < (first_page + pages) * size:
            raise PromptError(f"{len(ids)} tokens have no pages {first_page} to {first_page + pages} of {size}")
        if len(ids) > self.model.max_positions:
            raise ContextLengthError(f"{len(ids)} tokens exceed the producer's {self.model.max_positions}")
        if min(ids) < 0 or max(ids) >= self.model.signature.vocab_size:
            raise PromptError(f"token ids from {min(ids)} to {max(ids)}: the producer does not know all of them")

    async def _fill(self, order: _Order) -> None:
        """Find or make every page that is wanted."""
        for i in order.wanted:
            page = self._codes.get((order.coder.encoder.digest, order.hashes[i]))
            if page is not None:
                order.found[i] = page
        self.counters.add("code_hits", len(order.found))
        while order.lacking:
            have = self._content_pages(order)
            if have > order.lacking[0]:
                await self._encode_cached(order, have)
            elif not await self._flights.wait(order.hashes[have]):
                await self._prefill(order, have)

    def _content_pages(self, order: _Order) -> int:
        """How many leading pages of own content are at hand, with every hidden state that the encoder reads."""
        needed = set(order.coder.encoder.hidden_layers)
        for i, page_hash in enumerate(order.hashes):
            page = self._content.get(page_hash)
            if page is None or not needed <= page.hidden.keys():
                self._content.touch(order.hashes[:i])
                return i
        self._content.touch(order.hashes)
        return len(order.hashes)

    async def _encode_cached(self, order: _Order, have: int) -> None:
        pages = [self._content.get(h) for h in order.hashes[order.lacking[0] : have]]
        chunk = _joined([p for p in pages if p is not None])
        self._keep_codes(order, chunk.start, await self._run(order.coder.pages, chunk, order.hashes))

    async def _prefill(self, order: _Order, have: int) -> None:
        """Prefill and encode from page ``have`` to the end, page hashes claimed."""
        size, ids = order.coder.encoder.page_size, order.ids
        hidden = tuple(sorted({i for c in self._coders.values() for i in c.encoder.hidden_layers}))
        before = [self._content.get(h) for h in order.hashes[:have]]
        past = _joined([p for p in before if p is not None]).content if have else None
        chunk_tokens = max(size, self._settings.chunk // size * size)
        steps = capture(self.model, ids, chunk=chunk_tokens, hidden_layers=hidden, past=past)
        del before, past
        self.counters.add("prefixes_extended" if have else "prefixes_prefilled")
        with self._flights.claim(order.hashes[have:]) as claim:
            while (chunk := await self._run(next, steps, None)) is not None:
                self.counters.add("tokens_prefilled", chunk.content.tokens)
                order.prefilled += chunk.content.tokens
                first = chunk.start // size
                hashes = order.hashes[first : first + chunk.content.tokens // size]
                for page_hash, page in zip(hashes, await self._run(self._split, chunk, size), strict=True):
                    self._content.put(page_hash, page, _nbytes(page))
                if first + len(hashes) > order.wanted.start:
                    self._keep_codes(order, chunk.start, await self._run(order.coder.pages, chunk, order.hashes))
                for page_hash in hashes:
                    claim.land(page_hash)

    def _split(self, chunk: StateChunk, size: int) -> list[StateChunk]:
        """A chunk's pages in memory of their own, in the model's dtype, in which they were computed."""

        def own(tensor: Any) -> Any:
            return tensor.to(self.model.dtype, copy=True)

        return [
            StateChunk(
                chunk.start + a,
                ContentKV(own(chunk.content.keys[:, a : a + size]), own(chunk.content.values[:, a : a + size])),
                {layer: own(h[a : a + size]) for layer, h in chunk.hidden.items()},
            )
            for a in range(0, chunk.content.tokens, size)
        ]

    def _keep_codes(self, order: _Order, start: int, pages: Sequence[bytes]) -> None:
        digest, first = order.coder.encoder.digest, start // order.coder.encoder.page_size
        self.counters.add("pages_encoded", len(pages))
        for i, page in enumerate(pages, first):
            self._codes.put((digest, order.hashes[i]), page, len(page))
            if i in order.wanted:
                order.found[i] = page


class _Order:
    """One request on its way: what is wanted, and what was found or made so far."""

    def __init__(self, coder: _Coder, ids: list[int], hashes: list[bytes], wanted: range) -> None:
        self.coder = coder
        self.ids = ids
        self.hashes = hashes
        self.wanted = wanted
        self.found: dict[int, bytes] = {}
        self.prefilled = 0

    @property
    def lacking(self) -> list[int]:
        return [i for i in self.wanted if i not in self.found]


def _joined(pages: Sequence[StateChunk]) -> StateChunk:
    """Consecutive pages as one chunk; hidden states that all of them have."""
    layers = set.intersection(*(set(p.hidden) for p in pages))
    hidden = {layer: torch.cat([p.hidden[layer] for p in pages]) for layer in layers}
    return StateChunk(pages[0].start, ContentKV.concat([p.content for p in pages]), hidden)


def _nbytes(page: StateChunk) -> int:
    return page.content.keys.nbytes + page.content.values.nbytes + sum(h.nbytes for h in page.hidden.values())
