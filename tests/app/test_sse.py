"""What happens when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from app.sse import ClientGoneError, stream_response, while_connected


def request_that_leaves(after: asyncio.Event) -> Request:
    """Its client disconnects when ``after`` is set."""

    async def receive() -> dict[str, Any]:
        await after.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.anyio
class TestDisconnect:
    async def test_work_is_cancelled(self) -> None:
        """production-stack#867: a request that is not streamed must end too, before its answer is complete."""
        gone, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            gone.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(ClientGoneError):
            await while_connected(request_that_leaves(gone), work())
        assert ended.is_set()

    async def test_before_the_first_chunk(self) -> None:
        """The chunks are closed: nobody would read them, and nobody else would close them."""
        gone, closed = asyncio.Event(), asyncio.Event()

        async def chunks() -> AsyncGenerator[dict[str, Any]]:
            try:
                gone.set()
                await asyncio.Event().wait()
                yield {}
            finally:
                closed.set()

        with pytest.raises(ClientGoneError):
            await stream_response(request_that_leaves(gone), chunks(), "prompt")
        assert closed.is_set()

    async def test_result_passes(self) -> None:
        async def work() -> int:
            return 7

        assert await while_connected(request_that_leaves(asyncio.Event()), work()) == 7

    async def test_body_after_first_chunk_is_whole(self) -> None:
        """The first chunk is taken before the status is sent; it must not be lost or repeated."""

        async def chunks() -> AsyncGenerator[dict[str, Any]]:
            yield {"n": 1}
            yield {"n": 2}

        response = await stream_response(request_that_leaves(asyncio.Event()), chunks(), "prompt")
        data = b"".join([part async for part in response.body_iterator])
        assert data == b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
