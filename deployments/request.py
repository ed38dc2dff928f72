"""What goes into a specialist and what comes out: token ids and text, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scd_core.sampling import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, as text, as ids or as a conversation: exactly one of the three.

    Attributes:
        codes: False: the answer is wholly the specialist's own, and no page that codes filled is read.
    """

    request_id: str
    params: SamplingParams
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    codes: bool = True

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.text, self.token_ids, self.messages))
        if given != 1:
            raise ValueError(f"one of text, token_ids and messages is needed, not {given}")


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text and log-probability, and those of the likeliest ones in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """One generated token: the text that may be shown now, and, in the last one, why it ended."""

    text: str
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None


@dataclass
class Usage:
    """Where a request's tokens came from; the three counts of prompt tokens add up to ``prompt_tokens``.

    Attributes:
        codes_tokens: decoded from codes for this request.
        cache_tokens: found in pages that an earlier request left.
        native_tokens: prefilled by the specialist itself.
        pages: pages that came from codes.
        bytes: moved from the producer for it.
        raw_bytes: what the same pages take as keys and values in bfloat16.
        fallback: why codes were wanted but not used, if so.
        seconds: of getting the codes, by stage.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    codes_tokens: int = 0
    cache_tokens: int = 0
    native_tokens: int = 0
    pages: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    fallback: str | None = None
    seconds: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
