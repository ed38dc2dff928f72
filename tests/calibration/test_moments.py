"""Streamed moments against numpy on the whole, and their life on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from calibration.moments import Covariances, PairMoments
from scd_core.errors import CorpusError


def pair(tokens: int = 301) -> tuple[Tensor, Tensor]:
    """Two layers; channels that differ a thousandfold in mean and spread, as activations do."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-2, 1, 5)
    x = torch.randn(2, tokens, 5, generator=generator) * size + 1000 * size
    return x, torch.randn(2, tokens, 3, generator=generator) + x[..., :3]


def assert_is_numpy(moments: Covariances, x: Tensor, y: Tensor) -> None:
    a, b = x.double().numpy(), y.double().numpy()
    joint = np.cov(np.concatenate([a, b], 1).T, bias=True)
    d = a.shape[1]
    assert moments.count == len(a)
    np.testing.assert_allclose(moments.mean_x, a.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.mean_y, b.mean(0), rtol=1e-12)
    for got, want in ((moments.xx, joint[:d, :d]), (moments.xy, joint[:d, d:]), (moments.yy, joint[d:, d:])):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_chunks_give_what_the_whole_gives() -> None:
    """Chunks of uneven length, one of a single token; float32 sums would fail at these means."""
    x, y = pair()
    moments = PairMoments(2, 5, 3)
    for a, b in zip(x.split((100, 1, 200), 1), y.split((100, 1, 200), 1), strict=True):
        moments.update(a, b)
    for layer in range(2):
        assert_is_numpy(moments.of(layer), x[layer], y[layer])


def test_merged_halves_are_the_whole() -> None:
    """Two workers' moments: guards averaging where sums are due (the halves differ in length)."""
    x, y = pair()
    first, second = PairMoments(2, 5, 3), PairMoments(2, 5, 3)
    first.update(x[:, :40], y[:, :40])
    second.update(x[:, 40:], y[:, 40:])
    first.merge(second)
    assert_is_numpy(first.of(1), x[1], y[1])


def test_unpaired_chunk_is_refused() -> None:
    """States of other tokens or layers would be folded in silently where shapes happen to broadcast."""
    x, y = pair()
    moments = PairMoments(2, 5, 3)
    for a, b in ((x[:, :10], y[:, :9]), (x[:1], y[:1]), (y, x)):
        with pytest.raises(ValueError, match="chunk"):
            moments.update(a, b)
    assert moments.count == 0


def test_nothing_seen_is_an_error() -> None:
    """Division by zero tokens gives NaN, which no solver reports."""
    with pytest.raises(CorpusError, match="sinks"):
        PairMoments(1, 2, 2).of(0)
