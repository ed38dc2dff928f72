"""The HTTP interface over a pool in memory: every error in OpenAI's shape, and named."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from scd_core.errors import (
    ContextLengthError,
    EngineStoppedError,
    OverloadedError,
    PromptError,
    SpecialistUnavailableError,
    UnknownSpecialistError,
)
from tests.app.memory import Client, MemoryPool, error_of, events

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
