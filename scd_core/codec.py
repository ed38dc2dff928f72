"""The codec: an :class:`Encoder` beside the producer, a :class:`Decoder` beside each specialist.

Convention: a code is one row of ``columns`` coefficients per token, ordered by layer and, within a layer, by
stream (h, k, v). A decoder's layer therefore reads a *contiguous* run of columns, its own layer's or with its
neighbours', and decoding is one matrix product per layer.

Modes of a layer (SCD, arXiv 2606.07684, section 3, and what we add):

- REUSE: the specialist's de-rotated keys and values are an affine map of the codes of keys and values;
- PATCH: an affine map and a residual MLP (the aligner) give the specialist's normalised pre-attention input,
  and the specialist's own projections give its keys and values;
- NATIVE: nothing is sent. Only layer 0, whose keys and values depend on the token ids alone.

Codes are int8 symbols (quantised encoders), or bfloat16 or float32 coefficients. Shapes: T tokens, C columns,
L layers, ``kv_dim`` = KV heads x head dim; content keys are de-rotated, ``[L, T, kv_dim]``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu

from scd_core.capture import ContentKV, StateChunk
from scd_core.errors import ArtefactFormatError, CodeEncoderError, CodeFormatError, NonFiniteError

SINK_TOKENS = 4
"""So many first tokens of a prompt are always the specialist's own: they carry huge activations, and mapping
them cost 1.4 nats in a prototype. They fill no bytes and take no time worth counting."""

HELD_BACK = 16
"""At least so many last tokens of a prompt are prefilled natively on top of the codes."""

SYMBOL_LIMIT = 127

Kind = Literal["h", "k", "v"]
CODE_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, order=True)
class StreamSpec:
    """One stream of a code: ``rank`` coefficients of layer ``layer``'s keys, values or hidden input."""

    layer: int
    kind: Kind
    rank: int


class Projections(Protocol):
    """What a decoder needs of the specialist's model (``huggingface.LoadedModel`` offers it)."""

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]: ...

    def embedding_state(self, token_ids: Sequence[int]) -> Tensor: ...


class Encoder:
    """Maps a producer's state to codes: ``round((x - mean) @ basis / step)`` per stream, or unrounded.

    Args:
        streams: what is coded, in the order of the columns.
        means: per stream, ``[d]``.
        bases: per stream, ``[d, rank]``.
        steps: per column, ``[C]``: the quantiser's step in units of the coefficient; all ones when unquantised.
        code_dtype: "int8", "bfloat16" or "float32".
        packing: integer tables of the entropy model (``packing.fit_packing``); empty when unquantised.
    """

    def __init__(
        self,
        streams: Sequence[StreamSpec],
        means: Sequence[Tensor],
        bases: Sequence[Tensor],
        *,
        steps: Tensor | None = None,
        code_dtype: str = "int8",
        page_size: int = 32,
        packing: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.streams = tuple(streams)
        self.columns = sum(s.rank for s in self.streams)
        self.code_dtype = code_dtype
        self.page_size = page_size
        self.means = [m.float() for m in means]
        self.bases = [b.float() for b in bases]
        self.steps = torch.ones(self.columns) if steps is None else steps.float()
        self.packing = dict(packing or {})
        self._check()

    def _check(self) -> None:
        if list(self.streams) != sorted(set(self.streams)):
            raise ArtefactFormatError("an encoder's streams must be sorted by layer and kind, each once")
        if self.code_dtype not in CODE_DTYPES:
            raise ArtefactFormatError(f"code_dtype {self.code_dtype!r} is none of {sorted(CODE_DTYPES)}")
        if len(self.means) != len(self.streams) or len(self.bases) != len(self.streams):
            raise ArtefactFormatError(f"{len(self.streams)} streams need as many means and bases")
        for stream, mean, basis in zip(self.streams, self.means, self.bases, strict=True):
            if basis.ndim != 2 or basis.shape != (mean.shape[0], stream.rank):
                raise ArtefactFormatError(f"{stream}: basis {tuple(basis.shape)}, mean {tuple(mean.shape)}")
        if self.steps.shape != (self.columns,) or not bool((self.steps > 0).all()):
            raise ArtefactFormatError("steps must be positive, one per column")

    @property
    def quantised(self) -> bool:
        return self.code_dtype == "int8"

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose normalised pre-attention input must be captured."""
        return tuple(s.layer for s in self.streams if s.kind == "h")

    @cached_property
    def slices(self) -> dict[tuple[int, str], slice]:
        """Columns of each ``(layer, kind)``."""
        found, start = {}, 0
        for s in self.streams:
            found[s.layer, s.kind] = slice(start, start + s.rank)
            start += s.rank
        return found

    def layer_columns(self, first: int, last: int) -> slice:
        """The contiguous columns of layers ``first..last``, both included; empty when none is coded."""
        inside = [self.slices[s.layer, s.kind] for s in self.streams if first <= s.layer <= last]
        return slice(inside[0].start, inside[-1].stop) if inside else slice(0, 0)

    @cached_property
    def digest(self) -> str:
        """32 hex digits that name this encoder: codes are keyed by it, decoders are fitted to it."""
        h = hashlib.blake2b(json.dumps(self.spec(), sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors().items()):
            h.update(name.encode())
            h.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()

    @cached_property
    def _folded(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bases and offsets with the step folded in, so that encoding is one product and one rounding."""
        weights, offsets = [], []
        for stream, mean, basis in zip(self.streams, self.means, self.bases, strict=True):
            weight = basis / self.steps[self.slices[stream.layer, stream.kind]]
            weights.append(weight)
            offsets.append(mean @ weight)
        return weights, offsets

    def encode(self, chunk: StateChunk) -> Tensor:
        """Codes of a chunk of producer state.

        Returns:
            ``[T, C]`` in ``code_dtype``, on the state's device; symbols are clipped to +-127, sinks are zero.

        Raises:
            NonFiniteError: the state holds NaN or infinity.
        """
        device = chunk.content.keys.device
        codes = torch.empty(chunk.content.tokens, self.columns, dtype=CODE_DTYPES[self.code_dtype], device=device)
        for stream, weight, offset in zip(self.streams, *self._folded, strict=True):
            x_TD = self._state(chunk, stream).float()
            z_TR = x_TD @ weight.to(device) - offset.to(device)
            if not bool(torch.isfinite(z_TR).all()):
                raise NonFiniteError(f"the producer's state of layer {stream.layer} ({stream.kind}) is not finite")
            if self.quantised:
                z_TR = z_TR.round_().clamp_(-SYMBOL_LIMIT, SYMBOL_LIMIT)
            codes[:, self.slices[stream.layer, stream.kind]] = z_TR.to(codes.dtype)
        # the specialist computes the sinks itself: zeros cost next to nothing on the wire
        codes[: max(0, SINK_TOKENS - chunk.start)] = 0
        return codes

    @staticmethod
    def _state(chunk: StateChunk, stream: StreamSpec) -> Tensor:
        if stream.kind == "h":
            return chunk.hidden[stream.layer]
        return (chunk.content.keys if stream.kind == "k" else chunk.content.values)[stream.layer]

    def spec(self) -> dict[str, Any]:
        """All but the tensors, as JSON."""
        return {
            "streams": [[s.layer, s.kind, s.rank] for s in self.streams],
            "code_dtype": self.code_dtype,
            "page_size": self.page_size,
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name. Means and steps are float32; bases float16 when quantised, else float32."""
        named: dict[str, Tensor] = {"steps": self.steps}
        for stream, mean, basis in zip(self.streams, self.means, self.bases, strict=True):
            named[f"{stream.layer}.{stream.kind}.mean"] = mean
            named[f"{stream.layer}.{stream.kind}.basis"] = basis.half() if self.quantised else basis
        return {**named, **{f"packing.{k}": v for k, v in self.packing.items()}}

    @classmethod
    def from_tensors(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Encoder:
        """The inverse of ``spec`` and ``tensors``.

        Raises:
            ArtefactFormatError: a field or tensor is missing or of a wrong shape.
        """
        try:
            streams = [StreamSpec(int(layer), kind, int(rank)) for layer, kind, rank in spec["streams"]]
            return cls(
                streams,
                [tensors[f"{s.layer}.{s.kind}.mean"] for s in streams],
                [tensors[f"{s.layer}.{s.kind}.basis"] for s in streams],
                steps=tensors["steps"],
                code_dtype=spec["code_dtype"],
                page_size=int(spec["page_size"]),
                packing={k.removeprefix("packing."): v for k, v in tensors.items() if k.startswith("packing.")},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactFormatError(f"encoder: missing or malformed field {error}") from error

    def rounded(self) -> Encoder:
        """This encoder as it will be read back: fit a decoder to it, not to one of finer bases."""
        return Encoder.from_tensors(self.spec(), self.tensors())


@dataclass(frozen=True, slots=True)
class ReuseLayer:
    """Keys and values from the codes of layers ``first..last``.

    ``base`` adds the synthesis by the encoder's own bases of this layer's streams, which is the producer's
    state itself; ``weight`` ``[n, 2 kv_dim]`` (or its factors ``down`` ``[n, q]``, ``up`` ``[q, 2 kv_dim]``)
    acts on coefficients, n of them in the window, and ``bias`` is ``[2 kv_dim]``.
    """

    first: int
    last: int
    bias: Tensor
    weight: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None
    base: bool = False

    def full_weight(self, encoder: Encoder, layer: int) -> Tensor:
        """``[n, 2 kv_dim]``, in units of coefficients (the quantiser's step not folded in)."""
        window = encoder.layer_columns(self.first, self.last)
        total = torch.zeros(window.stop - window.start, self.bias.shape[0])
        if self.weight is not None:
            total += self.weight.float()
        if self.down is not None and self.up is not None:
            total += self.down.float() @ self.up.float()
        if self.base:
            total += synthesis(encoder, layer, self.first, self.last)
        return total

    def full_bias(self, encoder: Encoder, layer: int) -> Tensor:
        """``[2 kv_dim]``."""
        return self.bias.float() + (producer_means(encoder, layer) if self.base else 0.0)


@dataclass(frozen=True, slots=True)
class PatchLayer:
    """The specialist's H_in from the codes of the producer's: affine, and a zero-started residual MLP.

    ``weight`` ``[r, hidden]``, ``bias`` ``[hidden]``; aligner ``w1`` ``[hidden, width]``, ``b1``, ``w2``
    ``[width, hidden]``, ``b2``.
    """

    weight: Tensor
    bias: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def hidden(self, coefficients: Tensor) -> Tensor:
        """``[T, r] -> [T, hidden]``."""
        h = coefficients @ self.weight.float() + self.bias.float()
        return h + gelu(h @ self.w1.float() + self.b1.float()) @ self.w2.float() + self.b2.float()


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """Layer 0 from the token ids, through the specialist's own embedding, norm and projections."""


LayerDecoder = ReuseLayer | PatchLayer | NativeLayer
_MODES: dict[str, type[ReuseLayer] | type[PatchLayer] | type[NativeLayer]] = {
    "reuse": ReuseLayer,
    "patch": PatchLayer,
    "native": NativeLayer,
}


def synthesis(encoder: Encoder, layer: int, first: int, last: int) -> Tensor:
    """``[n, 2 kv_dim]``: the map from the window's coefficients to the producer's own keys and values.

    The bases must be orthonormal, so that their transposes synthesise.
    """
    window = encoder.layer_columns(first, last)
    keys, values = (encoder.streams.index(_stream(encoder, layer, kind)) for kind in ("k", "v"))
    dim = encoder.bases[keys].shape[0]
    total = torch.zeros(window.stop - window.start, 2 * dim)
    for half, index, kind in ((0, keys, "k"), (1, values, "v")):
        where = encoder.slices[layer, kind]
        rows = slice(where.start - window.start, where.stop - window.start)
        total[rows, half * dim : (half + 1) * dim] = encoder.bases[index].T
    return total


def producer_means(encoder: Encoder, layer: int) -> Tensor:
    """``[2 kv_dim]``: means of the producer's keys and values."""
    return torch.cat([encoder.means[encoder.streams.index(_stream(encoder, layer, kind))] for kind in ("k", "v")])


def _stream(encoder: Encoder, layer: int, kind: str) -> StreamSpec:
    for stream in encoder.streams:
        if stream.layer == layer and stream.kind == kind:
            return stream
    raise ArtefactFormatError(f"the encoder has no {kind!r} stream of layer {layer}")


class Decoder:
    """Maps codes to the specialist's content keys and values: one :data:`LayerDecoder` per layer."""

    def __init__(self, encoder: Encoder, layers: Sequence[LayerDecoder], kv_dim: int) -> None:
        self.encoder = encoder
        self.encoder_digest = encoder.digest
        self.layers = tuple(layers)
        self.kv_dim = kv_dim
        for index, layer in enumerate(self.layers):
            self._check(index, layer)

    def _check(self, index: int, layer: LayerDecoder) -> None:
        if isinstance(layer, NativeLayer):
            if index != 0:
                raise ArtefactFormatError(f"layer {index} cannot be native: only layer 0 depends on ids alone")
        elif isinstance(layer, PatchLayer):
            rank = _stream(self.encoder, index, "h").rank
            if layer.weight.shape[0] != rank:
                raise ArtefactFormatError(f"layer {index}: patch of rank {layer.weight.shape[0]}, code of {rank}")
        elif layer.full_weight(self.encoder, index).shape[1] != 2 * self.kv_dim:
            raise ArtefactFormatError(f"layer {index}: a reuse decoder must give {2 * self.kv_dim} values")

    @cached_property
    def _maps(self) -> list[tuple[slice, Tensor, Tensor] | None]:
        """Per REUSE layer: its columns, and weight and bias with the quantiser's step folded in."""
        maps: list[tuple[slice, Tensor, Tensor] | None] = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, ReuseLayer):
                maps.append(None)
                continue
            window = self.encoder.layer_columns(layer.first, layer.last)
            weight = self.encoder.steps[window, None] * layer.full_weight(self.encoder, index)
            maps.append((window, weight.to(self.compute_dtype), layer.full_bias(self.encoder, index)))
        return maps

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """bfloat16 where the processor multiplies it faster and codes are small integers (exact in it)."""
        fast = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if self.encoder.quantised and fast else torch.float32

    def decode(self, codes: Tensor, token_ids: Sequence[int], model: Projections) -> ContentKV:
        """The specialist's content of the coded tokens.

        Args:
            codes: ``[T, C]``, as the encoder made them.
            token_ids: the T tokens' ids (a NATIVE layer reads them).
            model: the specialist (PATCH and NATIVE layers use its projections).

        Raises:
            CodeFormatError: wrong shape or dtype.
            NonFiniteError: the decoded state holds NaN or infinity.
        """
        tokens = codes.shape[0]
        if codes.shape != (len(token_ids), self.encoder.columns):
            raise CodeFormatError(
                f"codes {tuple(codes.shape)} for {len(token_ids)} tokens of {self.encoder.columns} columns"
            )
        if codes.dtype != CODE_DTYPES[self.encoder.code_dtype]:
            raise CodeFormatError(f"codes of {codes.dtype}, the encoder makes {self.encoder.code_dtype}")
        keys = torch.empty(len(self.layers), tokens, self.kv_dim, device=codes.device)
        values = torch.empty_like(keys)
        wide = codes.to(self.compute_dtype)
        for index, (layer, mapped) in enumerate(zip(self.layers, self._maps, strict=True)):
            if mapped is not None:
                window, weight, bias = mapped
                kv = (wide[:, window] @ weight.to(codes.device)).float() + bias.to(codes.device)
                keys[index], values[index] = kv[:, : self.kv_dim], kv[:, self.kv_dim :]
            elif isinstance(layer, PatchLayer):
                where = self.encoder.slices[index, "h"]
                hidden = layer.hidden(codes[:, where].float() * self.encoder.steps[where].to(codes.device))
                keys[index], values[index] = model.project(index, hidden)
            else:
                keys[index], values[index] = model.project(index, model.embedding_state(token_ids))
        if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
            raise NonFiniteError("the decoded keys or values are not finite")
        return ContentKV(keys, values)

    def spec(self) -> dict[str, Any]:
        """All but the tensors, as JSON."""
        modes = {kind: name for name, kind in _MODES.items()}
        return {
            "encoder": self.encoder_digest,
            "kv_dim": self.kv_dim,
            "layers": [
                {"mode": modes[type(layer)], **{k: v for k, v in _fields(layer).items() if not torch.is_tensor(v)}}
                for layer in self.layers
            ],
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, bfloat16: a decoder's rounding is far below the quantiser's."""
        return {
            f"{index}.{name}": value.to(torch.bfloat16) if self.encoder.quantised else value.float()
            for index, layer in enumerate(self.layers)
            for name, value in _fields(layer).items()
            if torch.is_tensor(value)
        }

    @classmethod
    def from_tensors(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor], encoder: Encoder) -> Decoder:
        """The inverse of ``spec`` and ``tensors``.

        Raises:
            CodeEncoderError: ``encoder`` is not the one this decoder was fitted to.
            ArtefactFormatError: a field or tensor is missing, or does not fit the encoder.
        """
        try:
            if spec["encoder"] != encoder.digest:
                raise CodeEncoderError(f"decoder fitted to encoder {spec['encoder']}, not {encoder.digest}")
            layers: list[LayerDecoder] = []
            for index, fields in enumerate(spec["layers"]):
                plain = {k: v for k, v in fields.items() if k != "mode"}
                prefix = f"{index}."
                own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
                layers.append(_MODES[fields["mode"]](**plain, **own))
            return cls(encoder, layers, int(spec["kv_dim"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactFormatError(f"decoder: missing or malformed field {error}") from error


def _fields(layer: LayerDecoder) -> dict[str, Any]:
    present = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    return {name: value for name, value in present.items() if value is not None}


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
