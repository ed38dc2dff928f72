"""A specialist: answers prompts, its cache warmed by codes where that can be, exactly its own answer where not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployments.config import SpecialistSettings
from deployments.counters import Counters
from deployments.link import ProducerLink
from deployments.prompts import tokenise
from deployments.request import GenerateRequest, Piece, TokenLogprob, Usage
from deployments.transport import Transport
from deployments.warm import Warmer, Warmth
from scd_core.codec import SINK_TOKENS
from scd_core.engine import Engine, TokenEvent
from scd_core.errors import NonFiniteError
from scd_core.huggingface import LoadedModel
from scd_core.registry import SpecialistArtefact

INLINE_CHARACTERS = 20_000
"""Longer prompts are tokenised in a thread: a megabyte takes about a second."""

COUNTED = (
    "requests",
    "prompt_tokens",
    "codes_tokens",
    "cache_tokens",
    "native_tokens",
    "pages_from_codes",
    "bytes_fetched",
    "too_short",
)


class Specialist:
    """Serves one model. ``start`` it before the first request.

    Args:
        artefact: calibrated for this very model; verified by the caller.
        link: reaches the producer.
    """

    def __init__(
        self,
        model: LoadedModel,
        artefact: SpecialistArtefact,
        link: ProducerLink,
        transport: Transport,
        settings: SpecialistSettings,
    ) -> None:
        self.model = model
        self.counters = Counters()
        self.engine = Engine(
            model,
            page_size=artefact.encoder.page_size,
            cache_tokens=settings.cache_tokens,
            max_batch=settings.max_batch,
        )
        self._warmer = Warmer(self.engine, artefact, link, transport, settings, self.counters)
        self._in_flight = 0

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()

    def check_health(self) -> None:
        """Raises EngineStoppedError when the engine is not running."""
        self.engine.context_length  # noqa: B018  (the property checks)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Usage]:
        """The answer's pieces, and last its usage. Closing the iterator ends the generation.

        Raises:
            PromptError, ContextLengthError: before anything is fetched.
            EngineStoppedError: the engine failed.
        """
        self._in_flight += 1
        self.counters.add("requests")
        try:
            ids = await self._tokenise(request)
            self.engine.check(ids, request.params)
            warmth = await self._warmer.warm(ids) if request.codes else Warmth()
            usage = Usage(prompt_tokens=len(ids), bytes=warmth.bytes, fallback=warmth.fallback)
            usage.seconds = warmth.seconds or None
            # generators that are merely dropped end when the collector comes by: each is closed by its reader
            async with aclosing(self._events(ids, request, usage)) as events:
                async for event in events:
                    if usage.completion_tokens == 0:
                        self._account(usage, warmth, event.cached_tokens)
                    usage.completion_tokens += 1
                    yield self._piece(event)
            yield usage
        finally:
            self._in_flight -= 1

    async def _tokenise(self, request: GenerateRequest) -> list[int]:
        if request.token_ids is not None or _characters(request) <= INLINE_CHARACTERS:
            return tokenise(self.model.tokenizer, request)
        return await asyncio.to_thread(tokenise, self.model.tokenizer, request)

    async def _events(self, ids: list[int], request: GenerateRequest, usage: Usage) -> AsyncGenerator[TokenEvent]:
        """The engine's events; once more without codes when the first logits over codes are not finite."""
        started = False
        try:
            async with aclosing(self._stream(ids, request, native=not request.codes)) as events:
                async for event in events:
                    started = True
                    yield event
        except NonFiniteError:
            if started or not request.codes:
                raise
            self.counters.add("fallback.non_finite")
            usage.fallback = "non_finite"
            async with aclosing(self._stream(ids, request, native=True)) as events:
                async for event in events:
                    yield event

    def _stream(self, ids: list[int], request: GenerateRequest, native: bool) -> AsyncGenerator[TokenEvent]:
        return self.engine.stream(ids, request.params, request.request_id, native=native)

    def _account(self, usage: Usage, warmth: Warmth, cached: int) -> None:
        """Split the prompt by where its tokens came from; sinks are native, though they lie in a seeded page."""
        size = self.engine.page_size
        first = warmth.first_page * size
        codes = max(0, min(cached, first + warmth.pages * size) - first)
        sinks = SINK_TOKENS if codes and first == 0 else 0
        usage.pages = codes // size
        usage.codes_tokens = codes - sinks
        usage.cache_tokens = cached - codes
        usage.native_tokens = usage.prompt_tokens - usage.codes_tokens - usage.cache_tokens
        usage.raw_bytes = codes * 2 * self.model.layers * self.model.kv_dim * 2
        for name in ("prompt_tokens", "codes_tokens", "cache_tokens", "native_tokens"):
            self.counters.add(name, getattr(usage, name))

    def _piece(self, event: TokenEvent) -> Piece:
        if event.logprob is None:
            return Piece(event.text, None, event.finish_reason)
        top = tuple((self._text(i), logprob) for i, logprob in event.top or ())
        return Piece(event.text, TokenLogprob(self._text(event.token_id), event.logprob, top), event.finish_reason)

    def _text(self, token_id: int) -> str:
        return str(self.model.tokenizer.decode([token_id]))

    def stats(self) -> dict[str, Any]:
        """Counters since the start, gauges, and the engine's own."""
        totals = {**dict.fromkeys(COUNTED, 0), **self.counters.as_dict()}
        fallbacks = {k.removeprefix("fallback."): v for k, v in totals.items() if k.startswith("fallback.")}
        counts = {k: v for k, v in totals.items() if not k.startswith("fallback.")}
        return {**counts, "fallbacks": fallbacks, "in_flight": self._in_flight, "engine": self.engine.stats()}


def _characters(request: GenerateRequest) -> int:
    if request.text is not None:
        return len(request.text)
    return sum(len(str(m.get("content", ""))) for m in request.messages or ())
