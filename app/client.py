"""A small client of the pool's own interface: for the demo and for the commands that talk to a running pool."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.serve import PoolNote
from scd_core.errors import PoolError


@dataclass
class Answer:
    """One streamed answer: when its first text came, and where its prompt's tokens came from."""

    text: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    scd: dict[str, Any] = field(default_factory=dict)


class Client:
    """Talks to one pool."""

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def ask(self, model: str, message: str, *, codes: bool, max_tokens: int) -> Answer:
        """Ask greedily.

        Raises:
            PoolError: the pool refused, or broke off.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "scd": {"usage": True, "codes": codes},
        }
        answer, start = Answer(), time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise PoolError(f"{model}: HTTP {response.status_code}: {response.read().decode()[:500]}")
            for chunk in _chunks(response):
                if "error" in chunk:
                    raise PoolError(f"{model}: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if not answer.ttft_s and (piece or choice["finish_reason"]):
                        answer.ttft_s = time.perf_counter() - start
                    answer.text += piece
                if not chunk["choices"]:
                    answer.prompt_tokens, answer.scd = chunk["usage"]["prompt_tokens"], chunk["scd"]
        return answer

    def stats(self) -> dict[str, Any]:
        """All counters."""
        return self._get("/v1/scd/stats")

    def standings(self) -> list[dict[str, str]]:
        """How every specialist of the pool's registry stands."""
        rows: list[dict[str, str]] = self._get("/v1/scd/specialists")["data"]
        return rows

    def reconcile(self, token: str, retry: str | None = None) -> list[dict[str, str]]:
        """Have the pool take up what is new in its registry, and ``retry`` even if it failed before.

        Returns how every specialist stands then.

        Raises:
            PoolError: the pool refused.
        """
        header = {"Authorization": f"Bearer {token}"}
        asked = {} if retry is None else {"retry": retry}
        response = self._http.post("/v1/scd/reconcile", headers=header, params=asked, timeout=600)
        if response.status_code != 200:
            raise PoolError(f"HTTP {response.status_code}: {response.text[:500]}")
        rows: list[dict[str, str]] = response.json()["data"]
        return rows

    def _get(self, path: str) -> dict[str, Any]:
        response = self._http.get(path)
        if response.status_code != 200:
            raise PoolError(f"{path}: HTTP {response.status_code}: {response.text[:500]}")
        found: dict[str, Any] = response.json()
        return found


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if line:
            yield json.loads(data)


def running(registry: str) -> tuple[Client, PoolNote] | None:
    """A client of the pool that serves this registry on this machine, or None when none answers."""
    note = PoolNote.read()
    if note is None or note.registry != registry:
        return None
    client = Client(note.url)
    try:
        client.standings()
    except (httpx.TransportError, PoolError):
        client.__exit__()
        return None
    return client, note
