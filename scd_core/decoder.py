"""The specialist's side of the codec: codes become the specialist's own content keys and values.

Modes of a layer (SCD, arXiv 2606.07684, section 3, and what we add):

- REUSE: the specialist's de-rotated keys and values are an affine map of the codes of keys and values, of its own
  layer or of its neighbours' too;
- PATCH: an affine map and a residual MLP (the aligner) give the specialist's normalised pre-attention input, and
  the specialist's own projections give its keys and values;
- NATIVE: nothing is sent. Only layer 0, whose keys and values depend on the token ids alone.

Decoding is one matrix product per layer. Shapes: T tokens, C columns, L layers, n columns of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu

from scd_core.capture import ContentKV
from scd_core.encoder import CODE_DTYPES, Encoder
from scd_core.errors import ArtefactFormatError, CodeEncoderError, CodeFormatError, NonFiniteError


class Projections(Protocol):
    """What a decoder needs of the specialist's model (``huggingface.LoadedModel`` offers it)."""

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]: ...

    def embedding_state(self, token_ids: Sequence[int]) -> Tensor: ...


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
    keys, values = (encoder.stream(layer, kind) for kind in ("k", "v"))
    dim = encoder.bases[keys].shape[0]
    total = torch.zeros(window.stop - window.start, 2 * dim)
    for half, index, kind in ((0, keys, "k"), (1, values, "v")):
        where = encoder.slices[layer, kind]
        rows = slice(where.start - window.start, where.stop - window.start)
        total[rows, half * dim : (half + 1) * dim] = encoder.bases[index].T
    return total


def producer_means(encoder: Encoder, layer: int) -> Tensor:
    """``[2 kv_dim]``: means of the producer's keys and values."""
    return torch.cat([encoder.means[encoder.stream(layer, kind)] for kind in ("k", "v")])


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
            rank = self.encoder.streams[self.encoder.stream(index, "h")].rank
            if layer.weight.shape[0] != rank:
                raise ArtefactFormatError(f"layer {index}: patch of rank {layer.weight.shape[0]}, code of {rank}")
        else:
            self._check_reuse(index, layer)

    def _check_reuse(self, index: int, layer: ReuseLayer) -> None:
        if not 0 <= layer.first <= index <= layer.last < len(self.layers):
            raise ArtefactFormatError(f"layer {index}: a window of layers {layer.first} to {layer.last}")
        window = self.encoder.layer_columns(layer.first, layer.last)
        inputs, outputs = window.stop - window.start, 2 * self.kv_dim
        rank = 0 if layer.down is None else layer.down.shape[-1]
        wanted = {"bias": (outputs,), "weight": (inputs, outputs), "down": (inputs, rank), "up": (rank, outputs)}
        for name, shape in wanted.items():
            held = getattr(layer, name)
            if held is not None and tuple(held.shape) != shape:
                raise ArtefactFormatError(f"layer {index}: {name} is {tuple(held.shape)}, not {shape}")
        if (layer.down is None) != (layer.up is None):
            raise ArtefactFormatError(f"layer {index}: one factor of the map without the other")

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
                {
                    "mode": modes[type(layer)],
                    **{k: v for k, v in _fields(layer).items() if not torch.is_tensor(v)},
                }
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
                plain: dict[str, Any] = {k: v for k, v in fields.items() if k != "mode"}
                prefix = f"{index}."
                own: dict[str, Any] = {
                    k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
                }
                layers.append(_MODES[fields["mode"]](**plain, **own))
            return cls(encoder, layers, int(spec["kv_dim"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactFormatError(f"decoder: missing or malformed field {error}") from error


def _fields(layer: LayerDecoder) -> dict[str, Any]:
    present = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    return {name: value for name, value in present.items() if value is not None}
