"""From a specialist's pieces to the JSON of OpenAI's API: whole answers and chunks, of text and of chat."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from app.schemas import ChatBody, GenerationBody
from deployments.request import Piece, TokenLogprob, Usage

Pieces = AsyncGenerator[Piece | Usage]


class Renderer:
    """One answer, in the form that its endpoint has.

    Args:
        identifier: of the request, also in the logs.
    """

    def __init__(self, body: GenerationBody, identifier: str) -> None:
        self._body = body
        self._chat = isinstance(body, ChatBody)
        self._id = f"chatcmpl-{identifier}" if self._chat else f"cmpl-{identifier}"
        self._created = int(time.time())
        self._text_offset = 0

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The answer in one."""
        texts, logprobs, reason, usage = [], [], None, Usage()
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Usage):
                    usage = piece
                    continue
                texts.append(piece.text)
                reason = piece.finish_reason or reason
                if piece.logprob is not None:
                    logprobs.append(piece.logprob)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice["logprobs"] = self._logprobs(logprobs) if logprobs else None
        if self._chat:
            choice["message"] = {"role": "assistant", "content": "".join(texts), "refusal": None}
        else:
            choice["text"] = "".join(texts)
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage_of(usage), **self._scd(usage)}

    async def chunks(self, pieces: Pieces) -> AsyncGenerator[dict[str, Any]]:
        """The answer as it comes. A piece without text is sent only where it says something else."""
        first = self._chat
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Usage):
                    if self._body.include_usage or self._body.scd.usage:
                        yield self._last(piece)
                    continue
                if first:
                    yield self._chunk({"role": "assistant", "content": ""}, None, None)
                    first = False
                if piece.text or piece.logprob or piece.finish_reason:
                    logprobs = self._logprobs([piece.logprob]) if piece.logprob else None
                    delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
                    yield self._chunk(delta if self._chat else piece.text, logprobs, piece.finish_reason)

    def _chunk(self, content: dict[str, Any] | str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self._chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head(self._chunk_kind), "choices": [choice], **usage}

    def _last(self, usage: Usage) -> dict[str, Any]:
        counts = {"usage": usage_of(usage)} if self._body.include_usage else {}
        return {**self._head(self._chunk_kind), "choices": [], **counts, **self._scd(usage)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._body.model}

    def _scd(self, usage: Usage) -> dict[str, Any]:
        return {"scd": scd_of(usage)} if self._body.scd.usage else {}

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {"content": [_chat_logprob(t) for t in tokens], "refusal": None}
        offsets = []
        tokens = list(tokens)
        for t in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(t.token)
        return {
            "tokens": [t.token for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [dict(t.top) for t in tokens],
            "text_offset": offsets,
        }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_entry(token.token, token.logprob), "top_logprobs": [_entry(t, p) for t, p in token.top]}


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8"))}


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage: cached tokens are those that the specialist did not prefill."""
    cached = usage.codes_tokens + usage.cache_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def scd_of(usage: Usage) -> dict[str, Any]:
    """This project's own field: where the prompt's tokens came from, and what it cost."""
    own = ("codes_tokens", "cache_tokens", "native_tokens", "pages", "bytes", "raw_bytes", "fallback", "seconds")
    everything = usage.as_dict()
    return {name: everything[name] for name in own}
