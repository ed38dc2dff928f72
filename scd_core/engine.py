"""The generation engine: token ids in, tokens and text out, many requests at once. It knows no HTTP and no codes.

Decoded pages only warm its prefix cache: whatever is missing, evicted or refused is prefilled natively.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import torch

from scd_core.capture import ContentKV, capture_all
from scd_core.detokenise import Detokeniser, special_ids
from scd_core.errors import ContextLengthError, EngineError, EngineStoppedError, NonFiniteError, PromptError
from scd_core.huggingface import LoadedModel
from scd_core.paged import PagedBatcher, Step
from scd_core.pages import PAGE
from scd_core.sampling import Choice, SamplingParams


@dataclass(frozen=True)
class TokenEvent:
    """One generated token.

    Args:
        text: what may be sent now; empty while a character is incomplete or a stop string may have begun.
        logprob, top: of this token and of the likeliest ones, when asked for.
        finish_reason: in the last event ``stop`` (an end-of-sequence token or a stop string), ``length`` or
            ``cancelled``, else None.
        cached_tokens: how many of the prompt's tokens were found in the prefix cache.
    """

    token_id: int
    text: str
    logprob: float | None
    top: list[tuple[int, float]] | None
    finish_reason: str | None
    cached_tokens: int


class Engine:
    """Serves one model by continuous batching.

    Args:
        cache_tokens: capacity of the key-value cache, prefix pages included.
        max_batch: requests that advance together; more wait.
        sinks: how many prefix beginnings ``sink_content`` remembers.
    """

    def __init__(
        self,
        model: LoadedModel,
        page_size: int = PAGE,
        cache_tokens: int = 32768,
        max_batch: int = 32,
        sinks: int = 256,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self._batcher = PagedBatcher(
            model.model,
            page_size=page_size,
            cache_tokens=cache_tokens,
            max_batch=max_batch,
            on_death=self._thread_ended,
        )
        self._lock = threading.Lock()
        self._inboxes: dict[str, _Inbox] = {}
        self._ended: EngineStoppedError | None = EngineStoppedError("the engine was not started")
        self._special = special_ids(model.tokenizer)
        self._end_ids = end_ids(model)
        self._sink_limit = sinks
        self._sinks: OrderedDict[tuple[int, ...], ContentKV] = OrderedDict()
        self._totals = dict.fromkeys(("requests", "prompt_tokens", "hit_tokens", "seeded_tokens", "cancelled"), 0)

    def start(self) -> None:
        """Start generating; returns when requests can be served."""
        with self._lock:
            if self._ended is None:
                raise EngineError("the engine is running already")
            self._ended = None
        try:
            self._batcher.start()
        except BaseException as error:
            self._thread_ended(error)
            raise

    def stop(self) -> None:
        """Stop. Every unfinished stream ends with EngineStoppedError; no thread is left."""
        self._batcher.stop()

    def _thread_ended(self, error: BaseException | None) -> None:
        stopped = EngineStoppedError(
            "the engine was stopped" if error is None else f"the engine failed: {error!r}"
        )
        with self._lock:
            if self._ended is None:
                self._ended = stopped
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.put(stopped)

    def _check_running(self) -> None:
        if self._ended is not None:
            raise EngineStoppedError(str(self._ended))

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        self._check_running()
        return min(self.model.max_positions, self._batcher.capacity)

    @property
    def can_seed(self) -> bool:
        """False for models with sliding windows, whose pages are not shared: all is prefilled natively."""
        self._check_running()
        return self._batcher.pages.shares

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that lie in cached full pages now. They may be evicted before a request comes."""
        self._check_running()
        return self._batcher.pages.matching(token_ids) * self.page_size

    def seed(self, token_ids: Sequence[int], first_token: int, kv: ContentKV) -> int:
        """Write decoded content as cached prefix pages, between two steps of generation.

        Args:
            token_ids: the whole prefix, ``first_token + kv.tokens`` ids: a multiple of the page size.
            first_token: where ``kv`` begins, a multiple of the page size; what lies before must be cached.
            kv: de-rotated content of this model.

        Returns the tokens written: pages that are cached already are left alone, and without room none is written.
        NonFiniteError when ``kv`` is not finite; nothing is written then.
        """
        self._check_running()
        end = first_token + kv.tokens
        expected = (self.model.layers, kv.tokens, self.model.kv_dim)
        if len(token_ids) != end or first_token % self.page_size or end % self.page_size or first_token < 0:
            raise ValueError(
                f"content of tokens {first_token} to {end} for {len(token_ids)} ids: not pages of {self.page_size}"
            )
        if tuple(kv.keys.shape) != expected or tuple(kv.values.shape) != expected:
            raise ValueError(f"content {tuple(kv.keys.shape)}, {tuple(kv.values.shape)} instead of {expected}")
        ids = self._checked_ids(token_ids)
        if end > self.context_length or self._batcher.pages.matching(ids) * self.page_size == end:
            return 0
        with torch.no_grad():
            keys = self.model.rotate(kv.keys, torch.arange(first_token, end, device=self.model.device))
        written = self._batcher.pages.write(ids, first_token, keys, kv.values) * self.page_size
        self._count(seeded_tokens=written)
        return written

    def sink_content(self, token_ids: Sequence[int]) -> ContentKV:
        """This model's own content of a prompt's first tokens (there is nothing before them); remembered."""
        ids = tuple(self._checked_ids(token_ids))
        with self._lock:
            if ids in self._sinks:
                self._sinks.move_to_end(ids)
                return self._sinks[ids]
        content = capture_all(self.model, ids).content
        with self._lock:
            self._sinks[ids] = content
            while len(self._sinks) > self._sink_limit:
                self._sinks.popitem(last=False)
        return content

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Refuse a request that cannot be served: PromptError, ContextLengthError. Returns its ``max_tokens``."""
        ids = self._checked_ids(token_ids)
        limit = self.context_length
        asked = params.max_tokens
        if len(ids) + (asked or 1) > limit:
            answer = f"{len(ids)} prompt tokens and {asked or 1} to generate"
            raise ContextLengthError(f"{answer} exceed the context of {limit} tokens")
        return limit - len(ids) if asked is None else asked

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in token_ids]
        if not ids:
            raise PromptError("the prompt is empty")
        known = self.model.model.get_input_embeddings().num_embeddings
        if min(ids) < 0 or max(ids) >= known:
            # an id outside the embedding would fail the forward of every request in the batch
            raise PromptError(f"token ids from {min(ids)} to {max(ids)}, but the model knows 0 to {known - 1}")
        return ids

    async def stream(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, native: bool = False
    ) -> AsyncGenerator[TokenEvent]:
        """Generate; ``native`` uses and leaves no cached page. Closing the iterator cancels and frees the pages.

        Raises what ``check`` does, EngineStoppedError, or NonFiniteError when the logits are not finite; the pages
        that led there are not used again.
        """
        self._check_running()
        max_tokens = self.check(token_ids, params)
        stop_ids = () if params.ignore_eos else self._end_ids
        choice = Choice(params)
        text = Detokeniser(self.model.tokenizer, params.stop, self._special)
        inbox = _Inbox(asyncio.get_running_loop())
        request_id = uuid4().hex if request_id is None else request_id
        name, done = None, False
        with self._lock:
            if self._ended is not None:
                raise EngineStoppedError(str(self._ended))
            if request_id in self._inboxes:
                raise EngineError(f"a request {request_id!r} is running already")
            self._inboxes[request_id] = inbox  # from here on the end of the thread is heard
        try:
            name = self._batcher.add(token_ids, max_tokens, stop_ids, choice, inbox.put, native)
            token_id, hits, known = -1, 0, list(token_ids)
            while not done:
                message = await inbox.get()
                if isinstance(message, EngineStoppedError):
                    raise EngineStoppedError(str(message))
                if message is None:
                    self._batcher.cancel(name)
                    done = True
                    yield TokenEvent(token_id, text.finish(), None, None, "cancelled", hits)
                    return
                if message.error is not None:
                    raise EngineStoppedError(message.error)
                chosen, token_id = choice.chosen[message.index], message.token_id
                if not chosen.finite:
                    self._batcher.cancel(name)
                    await asyncio.to_thread(self._batcher.pages.forget, known)  # others share the prefix
                    raise NonFiniteError("the logits hold NaN or infinity")
                known.append(token_id)
                if message.index == 0:
                    hits = max(0, len(token_ids) - choice.prefilled)
                    self._count(requests=1, prompt_tokens=len(token_ids), hit_tokens=hits)
                ended = token_id in stop_ids
                piece = "" if ended else text.push(token_id)
                if message.finished and not text.stopped:
                    piece += text.finish()
                if text.stopped and not message.finished:
                    self._batcher.cancel(name)
                done = text.stopped or message.finished
                reason = ("stop" if ended or text.stopped else "length") if done else None
                yield TokenEvent(token_id, piece, chosen.logprob, chosen.top, reason, hits)
        finally:
            with self._lock:
                self._inboxes.pop(request_id, None)
            if name is not None and not done:
                self._batcher.cancel(name)
                self._count(cancelled=1)

    def cancel(self, request_id: str) -> None:
        """End a request from outside: its stream yields a last event, ``cancelled``. Unknown ids are ignored."""
        with self._lock:
            inbox = self._inboxes.get(request_id)
        if inbox is not None:
            self._count(cancelled=1)
            inbox.put(None)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, amount in more.items():
                self._totals[name] += amount

    def stats(self) -> dict[str, int]:
        """Gauges (running, waiting, pages) and counters since the start (tokens prefilled, found, seeded)."""
        with self._lock:
            totals = dict(self._totals)
        return {**self._batcher.counts(), **totals}


class _Inbox:
    """A queue that any thread may fill and one event loop reads. None in it means: cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Step | EngineStoppedError | None] = asyncio.Queue()

    def put(self, message: Step | EngineStoppedError | None) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    async def get(self) -> Step | EngineStoppedError | None:
        return await self._queue.get()


def end_ids(model: LoadedModel) -> tuple[int, ...]:
    """The end-of-sequence ids of the model's own generation config, as plain ``generate`` uses them."""
    found = model.model.generation_config.eos_token_id
    if found is None:
        found = model.model.config.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
