"""A pool in memory and a client of the application over it, in one process."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx

from app.api import create_app
from deployments.names import Standing
from deployments.request import GenerateRequest, Piece, Usage
from scd_core.errors import UnknownSpecialistError


class MemoryPool:
    """Answers with given pieces, and fails where it is told to."""

    def __init__(self) -> None:
        self.pieces = [Piece("Hé"), Piece(""), Piece("llo 世界"), Piece("!", None, "stop")]
        self.usage = Usage(prompt_tokens=70, completion_tokens=4, codes_tokens=60, cache_tokens=4, native_tokens=6)
        self.before: Exception | None = None
        self.after: Exception | None = None
        self.asked: list[GenerateRequest] = []
        self.closed = 0
        self.reconciled = 0

    async def standings(self) -> Sequence[Standing]:
        return [Standing("good", "RUNNING"), Standing("bad", "DEPLOY_FAILED", "FingerprintError: other weights")]

    async def reconcile(self, retry: str | None = None) -> Sequence[Standing]:
        self.reconciled += 1
        return await self.standings()

    async def generate(self, name: str, request: GenerateRequest) -> AsyncGenerator[Piece | Usage]:
        self.asked.append(request)
        try:
            if name != "good":
                raise UnknownSpecialistError(f"there is no model {name!r}")
            if self.before:
                raise self.before
            for piece in self.pieces:
                yield piece
            if self.after:
                raise self.after
            yield self.usage
        finally:
            self.closed += 1

    async def stats(self) -> dict[str, Any]:
        return {"producers": {}, "specialists": {}}


class Client:
    """Calls the application in this process."""

    def __init__(self, pool: MemoryPool, limit: int = 50_000) -> None:
        self._transport = httpx.ASGITransport(create_app(pool, limit, "secret-token"), raise_app_exceptions=False)

    async def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as client:
            return await client.request(method, path, **more)

    async def chat(self, **body: Any) -> httpx.Response:
        full = {"model": "good", "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.call("POST", "/v1/chat/completions", json=full)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.call("POST", "/v1/completions", json={"model": "good", "prompt": "hi", **body})


def events(response: httpx.Response) -> list[Any]:
    """The data of every event, the last one being the word DONE."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, in OpenAI's shape or the test fails."""
    assert response.status_code >= 400
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
