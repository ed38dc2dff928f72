"""Warms a specialist's cache with codes: asks, fetches, checks, decodes, seeds.

Everything here may fail at any time and nothing may be wrong: a page is seeded only after all checks, under the
hash of the very tokens it was decoded for, so that a request that was abandoned meanwhile harms nobody. Whatever
could not be seeded is prefilled natively by the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.config import SpecialistSettings
from deployments.counters import Counters
from deployments.fallback import CACHE_FULL, UNEXPECTED, reason_of
from deployments.flight import Flights
from deployments.link import ProducerLink
from deployments.ticket import Ticket
from deployments.transport import Transport
from deployments.transport.base import Page
from scd_core.capture import ContentKV
from scd_core.codec import HELD_BACK, SINK_TOKENS
from scd_core.engine import Engine
from scd_core.errors import CodeEncoderError, CodeFormatError, FingerprintError, TransportError
from scd_core.packing import Packer
from scd_core.pages import coded_tokens, page_hashes
from scd_core.registry import SpecialistArtefact
from scd_core.wire import read_pages

log = logging.getLogger("scd.specialist")


@dataclass
class Warmth:
    """What codes did for one prompt.

    Attributes:
        first_page, pages: the pages seeded for it.
        bytes: fetched for it, used or not.
        fallback: why codes were wanted but not used.
        seconds: by stage.
    """

    first_page: int = 0
    pages: int = 0
    bytes: int = 0
    fallback: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = round(time.perf_counter() - start, 4)


class Warmer:
    """Brings the pages that an engine lacks, as codes of one artefact."""

    def __init__(
        self,
        engine: Engine,
        artefact: SpecialistArtefact,
        link: ProducerLink,
        transport: Transport,
        settings: SpecialistSettings,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._artefact = artefact
        self._packer = Packer.of(artefact.encoder)
        self._page = artefact.encoder.page_size
        self._link = link
        self._transport = transport
        self._settings = settings
        self._counters = counters
        self._flights = Flights()
        if engine.page_size != self._page:
            raise ValueError(f"the engine's pages hold {engine.page_size} tokens, the code's {self._page}")

    async def warm(self, token_ids: Sequence[int]) -> Warmth:
        """Seed what the engine lacks of a prompt's pages, as far as codes can. Never raises but when cancelled."""
        warmth = Warmth()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                await self._warm(token_ids, warmth)
        except Exception as error:
            warmth.fallback = reason_of(error)
            if warmth.fallback == UNEXPECTED:
                log.exception("unexpected error while codes were fetched; prefilling natively")
            else:
                log.info("prefilling natively (%s): %s", warmth.fallback, error)
        if warmth.fallback is not None:
            self._counters.add(f"fallback.{warmth.fallback}")
        self._counters.add("pages_from_codes", warmth.pages)
        self._counters.add("bytes_fetched", warmth.bytes)
        return warmth

    async def _warm(self, token_ids: Sequence[int], warmth: Warmth) -> None:
        wanted = coded_tokens(len(token_ids), self._page, HELD_BACK) // self._page
        ids = list(token_ids[: wanted * self._page])
        hashes = page_hashes(ids, self._page)
        while True:
            have = self._engine.cached_tokens(ids) // self._page
            if wanted - have < self._settings.min_pages:
                if wanted < self._settings.min_pages:
                    self._counters.add("too_short")
                return
            if not await self._flights.wait(hashes[have]):
                break
        with self._flights.claim(hashes[have:]):
            await self._bring(ids, hashes, have, warmth)

    async def _bring(self, ids: list[int], hashes: list[bytes], first: int, warmth: Warmth) -> None:
        asked_at, deadline = time.monotonic(), time.monotonic() + self._settings.deadline_s
        pages = len(hashes) - first
        with warmth.timed("prepare"):
            ticket = await self._link.prepare(ids, self._artefact.encoder.digest, first, pages)
        try:
            self._check_ticket(ticket, first, pages)
            ticket.check_age(asked_at)
            with warmth.timed("fetch"):
                data = await self._transport.fetch(ticket, deadline - time.monotonic())
            warmth.bytes = ticket.bytes
            seeded = await asyncio.to_thread(self._seed, ids, hashes, first, data, warmth)
        finally:
            await self._link.release(ticket.lease)
        warmth.first_page, warmth.pages = first, seeded
        if seeded < pages and self._engine.cached_tokens(ids) < len(ids):
            warmth.fallback = CACHE_FULL

    def _check_ticket(self, ticket: Ticket, first: int, pages: int) -> None:
        if ticket.producer != self._artefact.producer.fingerprint:
            raise FingerprintError(
                f"the producer is {ticket.producer}, calibrated for {self._artefact.producer.fingerprint}"
            )
        if ticket.encoder_digest != self._artefact.encoder.digest:
            raise CodeEncoderError(f"a ticket of encoder {ticket.encoder_digest}")
        if (ticket.first_page, ticket.pages) != (first, pages):
            raise CodeFormatError(
                f"a ticket of {ticket.pages} pages from {ticket.first_page}, asked for {pages} from {first}"
            )
        if ticket.transport != self._transport.name:
            raise TransportError(f"the producer sends by {ticket.transport}, not by {self._transport.name}")

    def _seed(
        self, ids: list[int], hashes: Sequence[bytes], first: int, data: Sequence[Page], warmth: Warmth
    ) -> int:
        """Check, decode and write; in a thread. Returns the pages written."""
        with warmth.timed("decode"):
            content = self._decode(ids, hashes, first, data)
        with warmth.timed("seed"):
            return self._engine.seed(ids, first * self._page, content) // self._page

    def _decode(self, ids: list[int], hashes: Sequence[bytes], first: int, data: Sequence[Page]) -> ContentKV:
        encoder = self._artefact.encoder
        codes = read_pages(
            data,
            packer=self._packer,
            encoder_digest=bytes.fromhex(encoder.digest),
            prefix_hashes=hashes[first:],
            first_index=first,
        )
        model = self._engine.model
        content = self._artefact.decoder.decode(codes.to(model.device), ids[first * self._page :], model)
        if first == 0:
            sinks = self._engine.sink_content(ids[:SINK_TOKENS])
            content.keys[:, :SINK_TOKENS], content.values[:, :SINK_TOKENS] = sinks.keys, sinks.values
        return content
