"""The HTTP interface over a pool in memory: shapes of answers, streams and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest

from app.api import create_app
from deployments.names import Standing
from deployments.request import GenerateRequest, Piece, TokenLogprob, Usage
from scd_core.errors import (
    ContextLengthError,
    EngineStoppedError,
    OverloadedError,
    PromptError,
    SpecialistUnavailableError,
    UnknownSpecialistError,
)


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


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


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


@pytest.fixture
def client(pool: MemoryPool) -> Client:
    return Client(pool)


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


@pytest.mark.anyio
class TestAnswers:
    async def test_chat(self, client: Client) -> None:
        response = await client.chat()
        body = response.json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "Héllo 世界!"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["total_tokens"] == 74
        assert "scd" not in body
        assert response.headers["x-request-id"] in body["id"]

    async def test_completion(self, client: Client) -> None:
        body = (await client.complete()).json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == "Héllo 世界!"

    @pytest.mark.parametrize("endpoint", ["chat", "complete"])
    async def test_stream_equals_whole(self, client: Client, endpoint: str) -> None:
        """Ids aside, a streamed answer says what the whole one says; one DONE, and it is last (ray#62228)."""
        call = getattr(client, endpoint)
        whole = (await call()).json()
        chunks = events(await call(stream=True, stream_options={"include_usage": True}))
        assert chunks.count("[DONE]") == 1
        assert chunks[-1] == "[DONE]"
        *parts, last = chunks[:-1]
        choices = [c["choices"][0] for c in parts]
        text = "".join(c["text"] if endpoint == "complete" else c["delta"].get("content", "") for c in choices)
        said = whole["choices"][0]
        assert text == (said["text"] if endpoint == "complete" else said["message"]["content"])
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(c["usage"] is None for c in parts)
        assert len({c["id"] for c in chunks[:-1]}) == 1

    async def test_no_usage_unasked(self, client: Client) -> None:
        chunks = events(await client.chat(stream=True))[:-1]
        assert all(len(c["choices"]) == 1 and "usage" not in c and "scd" not in c for c in chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    async def test_where_tokens_came_from(self, client: Client, pool: MemoryPool) -> None:
        whole = (await client.chat(scd={"usage": True, "codes": False})).json()["scd"]
        assert (whole["codes_tokens"], whole["cache_tokens"], whole["native_tokens"]) == (60, 4, 6)
        assert pool.asked[-1].codes is False
        streamed = events(await client.chat(stream=True, scd={"usage": True}))[-2]
        assert streamed["scd"] == whole
        assert streamed["choices"] == []
        assert pool.asked[-1].codes is True

    async def test_logprobs(self, client: Client, pool: MemoryPool) -> None:
        pool.pieces = [Piece("é", TokenLogprob("é", -0.5, (("é", -0.5), ("e", -1.5))), "length")]
        entry = (await client.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"][0]
        assert entry["bytes"] == [195, 169]
        assert [t["token"] for t in entry["top_logprobs"]] == ["é", "e"]
        assert pool.asked[-1].params.logprobs == 2
        own = (await client.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        assert own["token_logprobs"] == [-0.5]
        assert own["top_logprobs"] == [{"é": -0.5, "e": -1.5}]

    async def test_parameters_reach_the_engine(self, client: Client, pool: MemoryPool) -> None:
        await client.chat(
            max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, seed=-3, stop="x", user="u", n=1
        )
        params = pool.asked[-1].params
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.0, 0.5, 0)
        assert (params.seed, params.stop) == (-3, ("x",))

    async def test_prompt_forms(self, client: Client, pool: MemoryPool) -> None:
        for prompt in ("hi", ["hi"]):
            await client.complete(prompt=prompt)
            assert pool.asked[-1].text == "hi"
        for ids in ([1, 2], [[1, 2]]):
            await client.complete(prompt=ids)
            assert pool.asked[-1].token_ids == [1, 2]

    async def test_text_parts(self, client: Client, pool: MemoryPool) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await client.chat(messages=[{"role": "user", "content": parts, "name": None}])
        assert pool.asked[-1].messages == [{"role": "user", "content": "ab"}]

    async def test_only_what_serves_is_listed(self, client: Client) -> None:
        """A specialist whose weights changed is not listed, and visible with its reason elsewhere (vllm#34186)."""
        listed = (await client.call("GET", "/v1/models")).json()["data"]
        assert [m["id"] for m in listed] == ["good"]
        rows = (await client.call("GET", "/v1/scd/specialists")).json()["data"]
        assert "FingerprintError" in next(r for r in rows if r["name"] == "bad")["message"]
        assert error_of(await client.call("GET", "/v1/models/bad"))["code"] == "model_not_found"

    @pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-token"}])
    async def test_reconciling_needs_the_token(
        self, client: Client, pool: MemoryPool, header: dict[str, str]
    ) -> None:
        response = await client.call("POST", "/v1/scd/reconcile", headers=header)
        assert response.status_code == 401
        error_of(response)
        assert pool.reconciled == 0

    async def test_reconcile(self, client: Client, pool: MemoryPool) -> None:
        header = {"Authorization": "Bearer secret-token"}
        response = await client.call("POST", "/v1/scd/reconcile", headers=header)
        assert [row["name"] for row in response.json()["data"]] == ["good", "bad"]
        assert pool.reconciled == 1

    async def test_healthz(self, client: Client) -> None:
        assert (await client.call("GET", "/healthz")).status_code == 200


CHAT_FAULTS: list[tuple[dict[str, Any], str | None]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 5000}, "stop"),
    ({"n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    ({"stream_options": {"include_usage": True}}, None),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"top_logprobs": 3}, None),
    ({"scd": {"codess": False}}, "scd.codess"),
]


@pytest.mark.anyio
class TestErrors:
    @pytest.mark.parametrize(("change", "param"), CHAT_FAULTS, ids=lambda x: str(x)[:40])
    async def test_faults_are_named(
        self, client: Client, pool: MemoryPool, change: dict[str, Any], param: str | None
    ) -> None:
        """Nothing is silently ignored, and nothing faulty reaches a specialist (ray#56638, vllm#51447)."""
        response = await client.chat(**change)
        assert response.status_code == 400
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert pool.asked == []

    @pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", "b"], [[1], [2]], None, {}, [1.5], 7])
    async def test_prompts_that_are_none(self, client: Client, pool: MemoryPool, prompt: Any) -> None:
        response = await client.complete(prompt=prompt)
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"
        assert pool.asked == []

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[1]",
            b'"x"',
            b"\xff\xfe",
            b"[" * 20_000,
            b'{"model": NaN}',
            b'{"model": "good", "prompt": "\\ud800"}',
            b'{"max_tokens": ' + b"9" * 5000 + b"}",
        ],
        ids=lambda b: repr(b[:20]),
    )
    async def test_bodies_that_are_no_json(self, client: Client, body: bytes) -> None:
        response = await client.call("POST", "/v1/completions", content=body)
        assert response.status_code == 400
        error_of(response)

    async def test_body_limit(self, client: Client, pool: MemoryPool) -> None:
        """By the declared length and, when chunked, by what really comes (vllm#51447)."""
        response = await client.complete(prompt="x" * 60_000)
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"

        async def endless() -> AsyncGenerator[bytes]:
            while True:
                yield b" " * 10_000

        response = await client.call("POST", "/v1/completions", content=endless())
        assert response.status_code == 413
        assert pool.asked == []

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("error", "status", "code", "param"),
        [
            (ContextLengthError("too long"), 400, "context_length_exceeded", "messages"),
            (PromptError("empty"), 400, "invalid_prompt", "messages"),
            (UnknownSpecialistError("no"), 404, "model_not_found", "model"),
            (SpecialistUnavailableError("bad weights"), 503, "model_unavailable", "model"),
            (EngineStoppedError("stopped"), 503, "model_unavailable", "model"),
            (OverloadedError("full"), 429, "overloaded", None),
            (RuntimeError("secret detail"), 500, "internal_error", None),
        ],
        ids=lambda x: type(x).__name__ if isinstance(x, Exception) else None,
    )
    async def test_errors_before_the_first_token(
        self, pool: MemoryPool, error: Exception, status: int, code: str, param: str | None, stream: bool
    ) -> None:
        """A stream that fails before its first token answers with a status, not with 200 and an event."""
        pool.before = error
        response = await Client(pool).chat(stream=stream)
        assert response.status_code == status
        found = error_of(response)
        assert (found["code"], found["param"]) == (code, param)
        assert "secret" not in found["message"]
        assert ("retry-after" in response.headers) == (status in {429, 503})
        assert pool.closed == 1

    async def test_error_inside_a_stream(self, client: Client, pool: MemoryPool) -> None:
        """It becomes an event, and DONE still comes once."""
        pool.after = SpecialistUnavailableError("died")
        chunks = events(await client.chat(stream=True))
        assert chunks[-2]["error"]["code"] == "model_unavailable"
        assert chunks.count("[DONE]") == 1
        assert pool.closed == 1

    async def test_unknown_model(self, client: Client) -> None:
        """ray#64833: not a bare ``detail``."""
        response = await client.chat(model="nobody")
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"

    @pytest.mark.parametrize(
        ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)]
    )
    async def test_routing_errors(self, client: Client, method: str, path: str, status: int) -> None:
        response = await client.call(method, path)
        assert response.status_code == status
        error_of(response)
