"""The HTTP interface over a pool in memory: shapes of answers and streams."""

from __future__ import annotations

import pytest

from deployments.request import Piece, TokenLogprob
from tests.app.memory import Client, MemoryPool, error_of, events


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
