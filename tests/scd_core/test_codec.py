"""The codec's arithmetic, on made-up state: no model is needed to see that a code says what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scd_core.capture import ContentKV, StateChunk
from scd_core.codec import (
    SINK_TOKENS,
    Decoder,
    Encoder,
    NativeLayer,
    PatchLayer,
    ReuseLayer,
    StreamSpec,
    identity_codec,
    zero_codec,
)
from scd_core.errors import ArtefactFormatError, CodeEncoderError, CodeFormatError, NonFiniteError

LAYERS, TOKENS, DIM, HIDDEN = 3, 40, 16, 24


class FixedProjections:
    """Stands for a specialist whose keys and values are fixed linear maps of H_in."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        self.wk, self.wv = (torch.randn(LAYERS, HIDDEN, DIM, generator=g) for _ in range(2))
        self.table = torch.randn(100, HIDDEN, generator=g)

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden @ self.wk[layer], hidden @ self.wv[layer]

    def embedding_state(self, token_ids: list[int]) -> torch.Tensor:
        return self.table[torch.tensor(token_ids)]


def state(start: int = 32) -> StateChunk:
    g = torch.Generator().manual_seed(1)
    content = ContentKV(*(torch.randn(LAYERS, TOKENS, DIM, generator=g) for _ in range(2)))
    return StateChunk(start, content, {1: torch.randn(TOKENS, HIDDEN, generator=g)})


def orthonormal(seed: int, dim: int = DIM) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)))[0]


def quantised_encoder(step: float = 0.05) -> Encoder:
    streams = [StreamSpec(layer, kind, DIM) for layer in range(LAYERS) for kind in ("k", "v")]
    means = [torch.full((DIM,), 0.1 * i) for i in range(len(streams))]
    bases = [orthonormal(i) for i in range(len(streams))]
    return Encoder(streams, means, bases, steps=torch.full((LAYERS * 2 * DIM,), step)).rounded()


IDS = list(range(TOKENS))


def test_identity_codec_returns_the_state_exactly() -> None:
    encoder, decoder = identity_codec(LAYERS, DIM)
    chunk = state()
    decoded = decoder.decode(encoder.encode(chunk), IDS, FixedProjections())
    assert torch.equal(decoded.keys, chunk.content.keys)
    assert torch.equal(decoded.values, chunk.content.values)


def test_zero_codec_returns_nothing_of_the_state() -> None:
    encoder, decoder = zero_codec(LAYERS, DIM)
    decoded = decoder.decode(encoder.encode(state()), IDS, FixedProjections())
    assert decoded.keys.abs().max() == 0


def test_quantised_round_trip_is_within_half_a_step() -> None:
    """Guards the folded step, mean and basis: each, applied twice or not at all, breaks the bound."""
    encoder = quantised_encoder(step := 0.05)
    decoder = Decoder(encoder, [ReuseLayer(i, i, torch.zeros(2 * DIM), base=True) for i in range(LAYERS)], DIM)
    chunk = state()
    codes = encoder.encode(chunk)
    assert codes.dtype == torch.int8
    decoded = decoder.decode(codes, IDS, FixedProjections())
    # an error of half a step per orthonormal coefficient; bfloat16 products add 1 % of the state at most
    error = (decoded.keys - chunk.content.keys).square().mean().sqrt()
    assert error < step / 2 + 0.02
    assert error > step / 8, "nothing was quantised"


def test_a_window_reads_the_neighbours_columns() -> None:
    """Guards the window's offsets: layer 1 here is rebuilt from layer 2's codes alone."""
    encoder = quantised_encoder()
    weight = torch.zeros(3 * 2 * DIM, 2 * DIM)
    weight[2 * 2 * DIM :] = torch.block_diag(encoder.bases[4].T, encoder.bases[5].T)
    middle = ReuseLayer(0, 2, torch.cat([encoder.means[4], encoder.means[5]]), weight=weight)
    outer = [ReuseLayer(i, i, torch.zeros(2 * DIM), base=True) for i in (0, 2)]
    decoder = Decoder(encoder, [outer[0], middle, outer[1]], DIM)
    chunk = state()
    decoded = decoder.decode(encoder.encode(chunk), IDS, FixedProjections())
    assert torch.allclose(decoded.keys[1], chunk.content.keys[2], atol=0.2)
    assert not torch.allclose(decoded.keys[1], chunk.content.keys[1], atol=0.2)


def test_factored_weight_equals_the_full_one() -> None:
    encoder = quantised_encoder()
    g = torch.Generator().manual_seed(3)
    down, up = torch.randn(2 * DIM, 4, generator=g), torch.randn(4, 2 * DIM, generator=g)
    bias = torch.zeros(2 * DIM)
    factored = ReuseLayer(0, 0, bias, down=down, up=up, base=True).full_weight(encoder, 0)
    full = ReuseLayer(0, 0, bias, weight=down @ up, base=True).full_weight(encoder, 0)
    assert torch.allclose(factored, full, atol=1e-5)


def test_patch_layer_projects_with_the_specialists_own_weights() -> None:
    streams = [StreamSpec(0, "k", DIM), StreamSpec(0, "v", DIM), StreamSpec(1, "h", HIDDEN)]
    dims = [DIM, DIM, HIDDEN]
    encoder = Encoder(streams, [torch.zeros(d) for d in dims], [torch.eye(d) for d in dims], code_dtype="float32")
    zeros = torch.zeros(HIDDEN, 8), torch.zeros(8), torch.zeros(8, HIDDEN), torch.zeros(HIDDEN)
    patch = PatchLayer(torch.eye(HIDDEN), torch.zeros(HIDDEN), *zeros)
    decoder = Decoder(encoder, [ReuseLayer(0, 0, torch.zeros(2 * DIM), base=True), patch], DIM)
    chunk, model = state(), FixedProjections()
    decoded = decoder.decode(encoder.encode(chunk), IDS, model)
    assert torch.allclose(decoded.keys[1], chunk.hidden[1] @ model.wk[1], atol=1e-4)
    assert torch.allclose(decoded.values[1], chunk.hidden[1] @ model.wv[1], atol=1e-4)


def test_native_layer_takes_the_token_ids_and_no_columns() -> None:
    streams = [StreamSpec(layer, kind, DIM) for layer in (1, 2) for kind in ("k", "v")]
    encoder = Encoder(streams, [torch.zeros(DIM)] * 4, [torch.eye(DIM)] * 4, code_dtype="float32")
    reuse = [ReuseLayer(i, i, torch.zeros(2 * DIM), base=True) for i in (1, 2)]
    model = FixedProjections()
    decoded = Decoder(encoder, [NativeLayer(), *reuse], DIM).decode(encoder.encode(state()), IDS, model)
    assert torch.allclose(decoded.keys[0], model.table[:TOKENS] @ model.wk[0])
    with pytest.raises(ArtefactFormatError, match="layer 1 cannot be native"):
        Decoder(encoder, [NativeLayer(), NativeLayer(), reuse[1]], DIM)


def test_sinks_are_zeroed_only_at_the_start_of_a_prompt() -> None:
    """Sink activations would saturate the quantiser and cost bytes that no decoder reads."""
    encoder = quantised_encoder()
    assert encoder.encode(state(start=0))[:SINK_TOKENS].abs().sum() == 0
    assert encoder.encode(state(start=0))[SINK_TOKENS].abs().sum() > 0
    assert encoder.encode(state(start=32))[:SINK_TOKENS].abs().sum() > 0


def test_outliers_saturate_instead_of_wrapping_round() -> None:
    """An int8 cast without a clip turns +200 into -56: a large key would change its sign."""
    encoder = quantised_encoder()
    chunk = state()
    chunk.content.keys[0, 5] = 1e4 * encoder.bases[0][:, 0]
    assert encoder.encode(chunk)[5, 0] == 127


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_state_is_refused(poison: float) -> None:
    encoder = quantised_encoder()
    chunk = state()
    chunk.content.values[2, 7, 3] = poison
    with pytest.raises(NonFiniteError, match=r"layer 2 \(v\)"):
        encoder.encode(chunk)


def test_non_finite_decoding_is_refused() -> None:
    encoder = quantised_encoder()
    bias = torch.zeros(2 * DIM)
    bias[3] = float("inf")
    layers = [ReuseLayer(i, i, bias if i == 1 else torch.zeros(2 * DIM), base=True) for i in range(LAYERS)]
    with pytest.raises(NonFiniteError):
        Decoder(encoder, layers, DIM).decode(encoder.encode(state()), IDS, FixedProjections())


def test_codes_of_a_wrong_shape_or_dtype_are_refused() -> None:
    encoder, decoder = identity_codec(LAYERS, DIM)
    codes = encoder.encode(state())
    with pytest.raises(CodeFormatError, match="columns"):
        decoder.decode(codes[:, :-1], IDS, FixedProjections())
    with pytest.raises(CodeFormatError, match="float64"):
        decoder.decode(codes.double(), IDS, FixedProjections())


def test_artefact_round_trip_keeps_digest_and_decoding() -> None:
    encoder = quantised_encoder()
    g = torch.Generator().manual_seed(5)
    layers = [
        ReuseLayer(0, min(2, i + 1), torch.randn(2 * DIM, generator=g), base=True)
        if i
        else ReuseLayer(0, 1, torch.randn(2 * DIM, generator=g), weight=torch.randn(4 * DIM, 2 * DIM, generator=g))
        for i in range(LAYERS)
    ]
    decoder = Decoder(encoder, layers, DIM)
    again = Encoder.from_tensors(encoder.spec(), encoder.tensors())
    assert again.digest == encoder.digest
    read = Decoder.from_tensors(decoder.spec(), decoder.tensors(), again)
    codes = encoder.encode(state())
    assert torch.equal(again.encode(state()), codes)
    before, after = (d.decode(codes, IDS, FixedProjections()) for d in (decoder, read))
    # the decoder is stored in bfloat16: 2^-9 of each weight
    assert (before.keys - after.keys).norm() < 0.01 * before.keys.norm()


def test_a_decoder_refuses_another_encoder() -> None:
    encoder, other = quantised_encoder(0.05), quantised_encoder(0.06)
    decoder = Decoder(encoder, [ReuseLayer(i, i, torch.zeros(2 * DIM), base=True) for i in range(LAYERS)], DIM)
    assert encoder.digest != other.digest
    with pytest.raises(CodeEncoderError, match=other.digest):
        Decoder.from_tensors(decoder.spec(), decoder.tensors(), other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": 2, "last": 1}, "window of layers 2 to 1"),
        ({"first": 0, "last": 9}, "window of layers 0 to 9"),
        ({"bias": torch.zeros(3)}, "bias is"),
        ({"weight": torch.zeros(4, 4)}, "weight is"),
        ({"down": torch.zeros(2 * DIM, 4)}, "one factor"),
    ],
)
def test_a_malformed_reuse_layer_is_refused_by_name(change: dict[str, object], message: str) -> None:
    """Guards an artefact whose window or shapes would fail as a bare RuntimeError in the middle of a request."""
    encoder = quantised_encoder()
    layers = [ReuseLayer(i, i, torch.zeros(2 * DIM), base=True) for i in range(LAYERS)]
    layers[1] = replace(layers[1], **change)  # type: ignore[arg-type]
    with pytest.raises(ArtefactFormatError, match=f"layer 1: .*{message}"):
        Decoder(encoder, layers, DIM)
