"""Which layers to patch, by measurement (SCD, arXiv 2606.07684): quality gained per byte.

Every candidate is patched alone and ranked by its gain per extra byte; the curve is the quality of the first k of
that ranking together, k = 0, 1, 2, ...; k* is the argmax of the quality gained over k = 0 per byte sent. *Per byte
sent*, and not per extra byte, because returns diminish: per extra byte the first patch alone would always win,
while the paper's own curve peaks at its k = 6 only when all bytes count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

Quality = Callable[[frozenset[int]], float]
"""Quality, higher is better, with a set of layers patched and the others reused."""

Size = Callable[[frozenset[int]], float]
"""Bytes per token with a set of layers patched."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The first ``len(layers)`` layers of the ranking patched together."""

    layers: tuple[int, ...]
    quality: float
    bytes_per_token: float
    gain_per_byte: float


@dataclass(frozen=True, slots=True)
class Profile:
    """``gains`` of single layers, the curve along their ranking, and the chosen layers."""

    gains: dict[int, float]
    ranking: tuple[int, ...]
    curve: tuple[CurvePoint, ...]
    chosen: tuple[int, ...]

    def report(self) -> dict[str, Any]:
        """The profile as JSON."""
        return {
            "k": len(self.chosen),
            "chosen": list(self.chosen),
            "ranking": list(self.ranking),
            "gains": {str(layer): gain for layer, gain in sorted(self.gains.items())},
            "curve": [{"k": len(p.layers), **asdict(p)} for p in self.curve],
        }


def rank_layers(
    quality: Quality, size: Size, candidates: Iterable[int], progress: str | None = None
) -> tuple[tuple[int, ...], dict[int, float]]:
    """Candidates by gain per extra byte, best first, and each one's gain in quality."""
    none = frozenset[int]()
    start, bytes_none = quality(none), size(none)
    gains, worth = {}, {}
    for layer in tqdm(list(candidates), desc=progress, disable=progress is None):
        alone = frozenset({layer})
        gains[layer] = quality(alone) - start
        # a patch may cost no more than what it replaces: then its gain counts as if for one byte
        worth[layer] = gains[layer] / max(size(alone) - bytes_none, 1.0)
    return tuple(sorted(gains, key=lambda layer: (-worth[layer], layer))), gains


def budget_curve(
    quality: Quality, size: Size, ranking: Sequence[int], progress: str | None = None
) -> tuple[CurvePoint, ...]:
    """Quality with the first k layers of ``ranking`` patched, k = 0 ... ``len(ranking)``."""
    points: list[CurvePoint] = []
    for k in tqdm(range(len(ranking) + 1), desc=progress, disable=progress is None):
        layers = frozenset(ranking[:k])
        reached, sent = quality(layers), size(layers)
        gained = reached - points[0].quality if points else 0.0
        points.append(CurvePoint(tuple(ranking[:k]), reached, sent, gained / max(sent, 1.0)))
    return tuple(points)


def profile_patches(
    quality: Quality, size: Size, candidates: Iterable[int], most: int, progress: bool = False
) -> Profile:
    """Ranks the candidates and chooses how many of them, at most ``most``, to patch.

    No layer is chosen when no prefix of the ranking gains anything.
    """
    known: dict[frozenset[int], float] = {}

    def remembered(layers: frozenset[int]) -> float:
        if layers not in known:
            known[layers] = quality(layers)
        return known[layers]

    ranking, gains = rank_layers(remembered, size, candidates, "profile layers" if progress else None)
    curve = budget_curve(remembered, size, ranking[:most], "profile budget" if progress else None)
    # max keeps the first of equals: the fewest patches
    best = max(curve, key=lambda point: point.gain_per_byte)
    return Profile(gains, ranking, curve, tuple(sorted(best.layers)))
