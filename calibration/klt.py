"""The default encoder: the producer's own Karhunen-Loeve transform, one uniform step per layer and kind.

It sees the producer alone, so that one code serves every specialist and adding one invalidates nothing.
z = (x - mean) Q with Q the eigenvectors of the producer's covariance; the step is ``step`` times the root of the
mean eigenvalue, the same for all coefficients of a stream: reverse water-filling says that equal distortion
everywhere costs the fewest bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from scd_core.capture import StateChunk, capture_all
from scd_core.codec import SINK_TOKENS, Encoder, Kind, StreamSpec
from scd_core.huggingface import LoadedModel
from scd_core.packing import fit_packing
from scd_core.pages import PAGE


@dataclass(frozen=True, slots=True)
class KltSettings:
    """``step`` in standard deviations of a stream; layer 0 is native when ``native_first``."""

    step: float = 0.5
    native_first: bool = True
    tokens: int = 24_000
    packing_tokens: int = 4_000


def fit_klt(producer: LoadedModel, prompts: Sequence[Sequence[int]], settings: KltSettings) -> Encoder:
    """Fits the encoder on about ``settings.tokens`` tokens of ``prompts``, the sinks of each left out."""
    layers, dim = producer.layers, producer.kv_dim
    first = 1 if settings.native_first else 0
    count, total = 0, torch.zeros(2, layers, dim, dtype=torch.float64)
    square = torch.zeros(2, layers, dim, dim, dtype=torch.float64)
    used: list[Sequence[int]] = []
    with tqdm(total=settings.tokens, desc="fit encoder", unit="token") as progress:
        for ids in prompts:
            if count >= settings.tokens:
                break
            x = _content(producer, ids)[:, :, SINK_TOKENS:]
            if x.shape[2] == 0:
                continue
            total += x.double().sum(2)
            square += (x.mT @ x).double()
            count += x.shape[2]
            used.append(ids)
            progress.update(x.shape[2])
    mean = total / count
    covariance = square / count - mean[..., :, None] * mean[..., None, :]
    eigenvalues, bases = torch.linalg.eigh(covariance)
    kinds: tuple[Kind, ...] = ("k", "v")
    streams = [StreamSpec(layer, kind, dim) for layer in range(first, layers) for kind in kinds]
    where = [(kinds.index(s.kind), s.layer) for s in streams]
    steps = [settings.step * eigenvalues[i].clamp_min(0).mean().sqrt().float().expand(dim) for i in where]
    plain = Encoder(
        streams,
        [mean[i].float() for i in where],
        # widest coefficients first, so that a truncation or a picture reads in the order of what matters
        [bases[i].flip(-1).float() for i in where],
        steps=torch.cat(steps),
        page_size=PAGE,
    )
    symbols = _symbols(producer, plain, used, settings.packing_tokens)
    return Encoder(
        plain.streams,
        plain.means,
        plain.bases,
        steps=plain.steps,
        packing=fit_packing(symbols),
        page_size=PAGE,
    ).rounded()


def _content(producer: LoadedModel, ids: Sequence[int]) -> Tensor:
    content = capture_all(producer, ids).content
    return torch.stack([content.keys, content.values]).float().cpu()


def _symbols(producer: LoadedModel, encoder: Encoder, prompts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    found: list[Tensor] = []
    for ids in prompts:
        if sum(map(len, found)) >= tokens:
            break
        chunk: StateChunk = capture_all(producer, ids)
        found.append(encoder.encode(chunk)[SINK_TOKENS:].cpu())
    return torch.cat(found)
