"""The codec's public names, and the degenerate codecs that prove a harness before it measures anything."""

from __future__ import annotations

import torch

from scd_core.decoder import (
    Decoder,
    LayerDecoder,
    NativeLayer,
    PatchLayer,
    ReuseLayer,
    producer_means,
    synthesis,
)
from scd_core.encoder import HELD_BACK, SINK_TOKENS, Encoder, Kind, StreamSpec

__all__ = [
    "HELD_BACK",
    "SINK_TOKENS",
    "Decoder",
    "Encoder",
    "Kind",
    "LayerDecoder",
    "NativeLayer",
    "PatchLayer",
    "ReuseLayer",
    "StreamSpec",
    "identity_codec",
    "producer_means",
    "synthesis",
    "zero_codec",
]


def identity_codec(layers: int, kv_dim: int, *, page_size: int = 32) -> tuple[Encoder, Decoder]:
    """Sends the producer's content as it is (float32), and takes it as the specialist's own."""
    encoder = _plain_encoder(layers, kv_dim, page_size)
    reuse = [ReuseLayer(i, i, bias=torch.zeros(2 * kv_dim), base=True) for i in range(layers)]
    return encoder, Decoder(encoder, reuse, kv_dim)


def zero_codec(layers: int, kv_dim: int, *, page_size: int = 32) -> tuple[Encoder, Decoder]:
    """Decodes to zeros: a harness that does not notice it measures nothing."""
    encoder = _plain_encoder(layers, kv_dim, page_size)
    reuse = [ReuseLayer(i, i, bias=torch.zeros(2 * kv_dim)) for i in range(layers)]
    return encoder, Decoder(encoder, reuse, kv_dim)


def _plain_encoder(layers: int, kv_dim: int, page_size: int) -> Encoder:
    kinds: tuple[Kind, ...] = ("k", "v")
    streams = [StreamSpec(layer, kind, kv_dim) for layer in range(layers) for kind in kinds]
    means = [torch.zeros(kv_dim) for _ in streams]
    bases = [torch.eye(kv_dim) for _ in streams]
    return Encoder(streams, means, bases, code_dtype="float32", page_size=page_size)
