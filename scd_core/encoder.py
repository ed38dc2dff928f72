"""The producer's side of the codec: a state becomes codes.

Convention: a code is one row of C coefficients per token, ordered by layer and, within a layer, by stream (h, k,
v), so that the columns of neighbouring layers are contiguous. Codes are int8 symbols (quantised encoders), or
bfloat16 or float32 coefficients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from scd_core.capture import StateChunk
from scd_core.errors import ArtefactFormatError, NonFiniteError

SINK_TOKENS = 4
"""So many first tokens of a prompt are always the specialist's own: they carry huge activations, and mapping
them cost 1.4 nats in a prototype. They fill no bytes and take no time worth counting."""

HELD_BACK = 32
"""At least so many last tokens of a prompt are prefilled natively on top of the codes: a question, mostly. 32
rather than 16 took the demo's first pair from F1 0.767 to 0.800 (60 held-out questions; its own: 0.883)."""

SYMBOL_LIMIT = 127

Kind = Literal["h", "k", "v"]
CODE_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, order=True)
class StreamSpec:
    """One stream of a code: ``rank`` coefficients of layer ``layer``'s keys, values or hidden input."""

    layer: int
    kind: Kind
    rank: int


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
        found: dict[tuple[int, str], slice] = {}
        start = 0
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

    def stream(self, layer: int, kind: str) -> int:
        """Index of a stream.

        Raises:
            ArtefactFormatError: this encoder has no such stream.
        """
        for index, stream in enumerate(self.streams):
            if stream.layer == layer and stream.kind == kind:
                return index
        raise ArtefactFormatError(f"the encoder has no {kind!r} stream of layer {layer}")
