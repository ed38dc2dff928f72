"""One streamed request as seen from outside: when the first token came, and what the server says of it.

Convention: times are seconds by this process's own clock, from just before the request is sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


class LoadTestError(Exception):
    """The server did not do what the measurement asked for, so a figure would mean something else."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered request."""

    ttft_s: float
    total_s: float
    text: str
    prompt_tokens: int
    from_codes: int
    from_cache: int
    from_native: int
    bytes_moved: int


@dataclass(slots=True)
class _Seen:
    """What has come of a stream so far."""

    first: float | None = None
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    scd: dict[str, Any] = field(default_factory=dict)


def ask(client: httpx.Client, model: str, text: str, *, codes: bool, max_tokens: int = 8) -> Reply:
    """Sends one chat request and reads its stream to the end.

    The first chunk of a chat stream names the role and holds no text: the first token is the first chunk with
    text, or the one that ends the answer where there is none.

    Raises:
        LoadTestError: an error status, an error inside the stream, or a stream that says nothing of its tokens.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "scd": {"usage": True, "codes": codes},
    }
    seen = _Seen()
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise LoadTestError(f"{model}: HTTP {response.status_code}: {response.read().decode()[:500]}")
        for chunk in _events(response):
            _take(chunk, seen, time.perf_counter() - start)
    total = time.perf_counter() - start
    if seen.first is None or not seen.usage or not seen.scd:
        raise LoadTestError(f"{model}: the stream ended without a token, its usage or its scd field")
    return Reply(
        ttft_s=seen.first,
        total_s=total,
        text="".join(seen.text),
        prompt_tokens=int(seen.usage["prompt_tokens"]),
        from_codes=int(seen.scd["codes_tokens"]),
        from_cache=int(seen.scd["cache_tokens"]),
        from_native=int(seen.scd["native_tokens"]),
        bytes_moved=int(seen.scd["bytes"]),
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of every ``data:`` line up to ``[DONE]``."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _take(chunk: dict[str, Any], seen: _Seen, now: float) -> None:
    if "error" in chunk:
        raise LoadTestError(f"the stream broke off: {chunk['error']}")
    for choice in chunk.get("choices", []):
        piece = choice.get("delta", {}).get("content") or ""
        seen.text.append(piece)
        if seen.first is None and (piece or choice.get("finish_reason")):
            seen.first = now
    seen.usage = chunk.get("usage") or seen.usage
    seen.scd = chunk.get("scd") or seen.scd
