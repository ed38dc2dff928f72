"""From the factors of streams to an encoder and a decoder that reuse some layers and patch the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tqdm import tqdm

from calibration.aligner import linear_aligner
from calibration.factorise import Factors, factorise
from calibration.moments import StateMoments
from scd_core.codec import Decoder, Encoder, Kind, LayerDecoder, PatchLayer, ReuseLayer, StreamSpec
from scd_core.pages import PAGE

Streams = dict[tuple[int, Kind], Factors]
"""Factors by layer and kind."""


def factorise_all(moments: StateMoments, ranks: Mapping[Kind, int], ridge: float) -> Streams:
    """Factors of every stream that the moments cover."""
    layers = moments.pairs["k"].sums["x"].shape[0]
    kinds: tuple[Kind, ...] = ("k", "v")
    streams: list[tuple[int, Kind]] = [(layer, kind) for layer in range(layers) for kind in kinds]
    streams += [(layer, "h") for layer in moments.hidden_layers]
    return {
        (layer, kind): factorise(moments.of(layer, kind), ranks[kind], ridge)
        for layer, kind in tqdm(streams, desc="factorise")
    }


def assemble(factors: Streams, patches: Mapping[int, PatchLayer], layers: int) -> tuple[Encoder, Decoder]:
    """The codec that patches these layers and reuses the others."""
    kinds = {layer: ("h",) if layer in patches else ("k", "v") for layer in range(layers)}
    encoder = encoder_of(factors, [key for key in factors if key[1] in kinds[key[0]]])
    return encoder, decoder_of(encoder, factors, patches, layers)


def encoder_of(factors: Streams, keys: Sequence[tuple[int, Kind]]) -> Encoder:
    """The unquantised encoder of these streams."""
    streams = sorted(StreamSpec(layer, kind, factors[layer, kind].rank) for layer, kind in keys)
    parts = [factors[s.layer, s.kind] for s in streams]
    return Encoder(
        streams, [p.mean for p in parts], [p.encoder for p in parts], code_dtype="bfloat16", page_size=PAGE
    )


def decoder_of(encoder: Encoder, factors: Streams, patches: Mapping[int, PatchLayer], layers: int) -> Decoder:
    """The decoder that patches these layers of ``encoder``'s code and reuses the others."""
    kv_dim = factors[0, "k"].bias.shape[0]
    parts: list[LayerDecoder] = [patches.get(i) or _reuse_layer(encoder, factors, i) for i in range(layers)]
    return Decoder(encoder, parts, kv_dim)


def _reuse_layer(encoder: Encoder, factors: Streams, layer: int) -> ReuseLayer:
    """Keys from the code of keys, values from that of values; a hidden input's columns are not read."""
    keys, values = factors[layer, "k"], factors[layer, "v"]
    kv_dim, window = keys.bias.shape[0], encoder.layer_columns(layer, layer)
    weight = torch.zeros(window.stop - window.start, 2 * kv_dim)
    for kind, part, columns in (("k", keys, slice(0, kv_dim)), ("v", values, slice(kv_dim, None))):
        where = encoder.slices[layer, kind]
        weight[where.start - window.start : where.stop - window.start, columns] = part.decoder.float()
    return ReuseLayer(layer, layer, bias=torch.cat([keys.bias, values.bias]).float(), weight=weight)


def linear_patch(factors: Streams, layer: int) -> PatchLayer:
    """The aligner that moments alone give."""
    return linear_aligner(factors[layer, "h"].decoder, factors[layer, "h"].bias)
