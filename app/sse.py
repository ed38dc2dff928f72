"""Server-sent events: chunks as they come, an error if one comes, and one ``[DONE]``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from app.errors import of_exception

R = TypeVar("R")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGoneError(Exception):
    """The client has closed the connection; nobody reads an answer."""


def encode(data: dict[str, Any]) -> bytes:
    """One event. A chunk is whole UTF-8, since JSON has no half characters."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n\n"


async def events(chunks: AsyncGenerator[dict[str, Any]], prompt_param: str) -> AsyncIterator[bytes]:
    """Chunks as events. An error after the first chunk becomes an event: the status has been sent already."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield encode(chunk)
        except Exception as error:
            yield encode(of_exception(error, prompt_param).body)
        yield DONE


async def stream_response(request: Request, chunks: AsyncGenerator[dict[str, Any]], prompt_param: str) -> Any:
    """A streamed response, begun only when the first chunk is there: an error before it is an ordinary error.

    Raises:
        ClientGoneError: the client went before the first chunk; the chunks are closed.
        Exception: whatever the chunks raise before the first of them.
    """
    try:
        first = await while_connected(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return StreamingResponse(
        events(_with_first(first, chunks), prompt_param), media_type="text/event-stream", headers=HEADERS
    )


async def _with_first(
    first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def while_connected(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """The result of ``work``, which is cancelled when the client goes.

    Raises:
        ClientGoneError: the client went first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (gone, working):
            task.cancel()
            # cancelled work must have let go of what it holds before the next request comes
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
