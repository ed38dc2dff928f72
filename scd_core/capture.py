"""One chunked prefill gives a model's content state: de-rotated keys and values, and H_in where asked.

Convention: keys and values are ``[L, T, kv_dim]``, heads-major, keys before RoPE (and after qk-norm), float32.
They are read at the projections rather than from the cache: exact, without RoPE's round trip, and complete for
sliding-window layers, whose cache forgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scd_core.huggingface import LoadedModel


@dataclass(frozen=True)
class ContentKV:
    """Content keys and values, each ``[L, T, kv_dim]``."""

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.ndim != 3 or self.keys.shape != self.values.shape:
            raise ValueError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must be [L, T, C]"
            )

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def slice(self, start: int, stop: int) -> ContentKV:
        """Tokens ``start..stop`` (a view)."""
        return ContentKV(self.keys[:, start:stop], self.values[:, start:stop])

    @staticmethod
    def concat(parts: Sequence[ContentKV]) -> ContentKV:
        """The parts, one after the other."""
        return ContentKV(torch.cat([p.keys for p in parts], dim=1), torch.cat([p.values for p in parts], dim=1))


@dataclass(frozen=True)
class StateChunk:
    """State of the tokens from position ``start`` on; ``hidden`` maps a layer to its H_in, ``[T, hidden]``."""

    start: int
    content: ContentKV
    hidden: dict[int, Tensor] = field(default_factory=dict)


def capture(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    chunk: int = 512,
    hidden_layers: Sequence[int] = (),
    past: ContentKV | None = None,
) -> Iterator[StateChunk]:
    """Prefill in chunks; one chunk of activations is alive at a time.

    Args:
        token_ids: all ids, those of ``past`` included.
        hidden_layers: layers whose H_in is wanted.
        past: content of the first ``past.tokens`` tokens, from an earlier capture of the same ids: prefill
            continues after them.

    Yields:
        State of the tokens after ``past``, in order. Nothing when there are none.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be positive, not {chunk}")
    start = past.tokens if past is not None else 0
    prefill = model.prefill(past)
    for begin in range(start, len(token_ids), chunk):
        yield prefill.step(begin, token_ids[begin : begin + chunk], hidden_layers)


def capture_all(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    chunk: int = 512,
    hidden_layers: Sequence[int] = (),
    past: ContentKV | None = None,
) -> StateChunk:
    """``capture``'s chunks as one.

    Raises:
        ValueError: there are no tokens after ``past``.
    """
    parts = list(capture(model, token_ids, chunk=chunk, hidden_layers=hidden_layers, past=past))
    if not parts:
        raise ValueError("no tokens to capture")
    hidden = {layer: torch.cat([p.hidden[layer] for p in parts]) for layer in parts[0].hidden}
    return StateChunk(parts[0].start, ContentKV.concat([p.content for p in parts]), hidden)
