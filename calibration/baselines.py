"""What the paper compares SCD with, where the producer sends its cache itself: raw, and at four bits.

Both send *rotated* keys, as a cache holds them. The plain rows hand them to the specialist as they are, that is
with the producer's RoPE; the ``_rerotated`` rows take the producer's rotation off first and put the specialist's
on. Where both models rotate alike, the two rows are equal.

Shapes: L layers, T tokens, C = kv_dim; G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from calibration.harness import Parcel, PrefixState
from scd_core.capture import ContentKV
from scd_core.huggingface import LoadedModel

GROUP = 32
LEVELS = 15
SCALE_DTYPE = torch.float16


class Raw:
    """The producer's keys and values in bfloat16."""

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, *, rerotate: bool) -> None:
        self.name = "raw_rerotated" if rerotate else "raw"
        self._producer = producer
        self._reader = producer if rerotate else specialist

    def send(self, prefix: PrefixState) -> Parcel:
        content = prefix.state.content
        positions = torch.arange(content.tokens, device=content.keys.device)
        keys = self._producer.rotate(content.keys, positions).bfloat16()
        values = content.values.bfloat16()

        def open_parcel(_: ContentKV) -> ContentKV:
            return ContentKV(self._reader.derotate(keys.float(), positions), values.float())

        return Parcel(keys.nbytes + values.nbytes, open_parcel)


@dataclass(frozen=True, slots=True)
class FourBit:
    """A tensor at four bits, asymmetric, in groups of up to :data:`GROUP` along one dimension.

    ``nibbles`` holds two levels a byte; ``scale`` and ``low`` are one float16 per group.
    """

    nibbles: Tensor
    scale: Tensor
    low: Tensor
    shape: tuple[int, int, int]
    dim: int

    @property
    def nbytes(self) -> int:
        return self.nibbles.nbytes + self.scale.nbytes + self.low.nbytes

    @classmethod
    def of(cls, x: Tensor, dim: int) -> FourBit:
        """Quantises ``[L, T, C]`` in groups along ``dim``: 1 for keys (per channel), 2 for values (per token)."""
        grouped = _grouped(x, dim)
        low = grouped.amin(dim + 1, keepdim=True).to(SCALE_DTYPE)
        scale = ((grouped.amax(dim + 1, keepdim=True) - low.float()) / LEVELS).to(SCALE_DTYPE)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        levels = ((grouped - low.float()) / scale.float()).round_().clamp_(0, LEVELS).to(torch.uint8).flatten()
        if levels.numel() % 2:
            levels = torch.cat([levels, levels.new_zeros(1)])
        layers, tokens, channels = x.shape
        return cls(levels[::2] | (levels[1::2] << 4), scale, low, (layers, tokens, channels), dim)

    def dequantise(self) -> Tensor:
        """``[L, T, C]`` in float32."""
        levels = torch.stack([self.nibbles & LEVELS, self.nibbles >> 4], -1).flatten()[: math.prod(self.shape)]
        shape = list(self.scale.shape)
        shape[self.dim + 1] = self.shape[self.dim] // self.scale.shape[self.dim]
        return (levels.view(shape) * self.scale.float() + self.low.float()).reshape(self.shape)


def _grouped(x: Tensor, dim: int) -> Tensor:
    """``[L, T, C]`` with ``dim`` split in two: groups, and members of a group."""
    size = x.shape[dim]
    group = math.gcd(size, GROUP)
    return x.float().unflatten(dim, (size // group, group))


class Int4:
    """Four bits after KIVI (arXiv 2402.02750): keys per channel, values per token, float16 scale and minimum.

    KIVI keeps the newest tokens at full precision; here those are the held-back tail, which is not sent at all.
    """

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, *, rerotate: bool) -> None:
        self.name = "int4_rerotated" if rerotate else "int4"
        self._producer = producer
        self._reader = producer if rerotate else specialist

    def send(self, prefix: PrefixState) -> Parcel:
        content = prefix.state.content
        positions = torch.arange(content.tokens, device=content.keys.device)
        keys = FourBit.of(self._producer.rotate(content.keys, positions), dim=1)
        values = FourBit.of(content.values, dim=2)

        def open_parcel(_: ContentKV) -> ContentKV:
            return ContentKV(self._reader.derotate(keys.dequantise(), positions), values.dequantise())

        return Parcel(keys.nbytes + values.nbytes, open_parcel)
