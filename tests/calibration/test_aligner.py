"""The aligner: a linear start that training can only improve on, and a buffer that cannot grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from calibration.aligner import AlignerSettings, PairBuffer, fit_aligner, linear_aligner
from scd_core.codec import Encoder, PatchLayer, StreamSpec
from scd_core.errors import CorpusError

SETTINGS = AlignerSettings(width=48, steps=300, batch=128, rate=1e-2)


def bent(tokens: int = 1500, rank: int = 6, hidden: int = 8) -> tuple[Tensor, Tensor, PatchLayer]:
    """Codes, a target that bends away from linear, and the least-squares start; channels of uneven size."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(tokens, rank, generator=generator) * 2
    turn, bend = (torch.randn(rank, hidden, generator=generator) for _ in range(2))
    target = (codes @ turn + 3 * torch.relu(codes @ bend)) * torch.logspace(-2, 1, hidden) + 5
    ones = torch.cat([codes, torch.ones(tokens, 1)], 1)
    solution = torch.linalg.lstsq(ones, target).solution
    return codes, target, linear_aligner(solution[:-1], solution[-1])


def test_it_starts_as_the_linear_map() -> None:
    """A residual that is not zero at first throws away what least squares has solved."""
    codes, target, start = bent()
    patch, errors = fit_aligner(codes, target, start, replace(SETTINGS, steps=0))
    assert torch.allclose(patch.hidden(codes), codes @ start.weight + start.bias)
    assert errors["linear"] == errors["aligner"]


def test_it_learns_what_is_not_linear() -> None:
    """Also guards folding the standardisation into the weights: the error is that of the returned layer."""
    codes, target, start = bent()
    patch, errors = fit_aligner(codes, target, start, SETTINGS)
    assert errors["aligner"] < 0.5 * errors["linear"]
    kept = round(len(codes) * 0.9)
    rest = (patch.hidden(codes[kept:]) - target[kept:]).square().mean()
    assert float(rest / target[:kept].var(0, correction=0).mean()) == pytest.approx(errors["aligner"], rel=1e-3)


def test_it_is_never_worse_than_its_start() -> None:
    """Few tokens and a wide MLP overfit: the best state on unseen tokens is kept, here the start."""
    generator = torch.Generator().manual_seed(1)
    codes, target = torch.randn(60, 6, generator=generator), torch.randn(60, 8, generator=generator)
    start = linear_aligner(torch.zeros(6, 8), torch.zeros(8))
    patch, errors = fit_aligner(codes, target, start, replace(SETTINGS, width=256, rate=2e-2))
    assert errors["aligner"] <= errors["linear"]
    assert torch.isfinite(patch.hidden(codes)).all()


def test_same_seed_same_aligner() -> None:
    """Batches and weights come from the seed alone, not from the global generator."""
    codes, target, start = bent()
    settings = replace(SETTINGS, steps=50)
    first, _ = fit_aligner(codes, target, start, settings)
    torch.manual_seed(99)
    again, _ = fit_aligner(codes, target, start, settings)
    other, _ = fit_aligner(codes, target, start, replace(settings, seed=1))
    assert torch.equal(first.w1, again.w1)
    assert not torch.equal(first.w1, other.w1)


def test_kv_metric_serves_keys_and_values() -> None:
    """Keys and values read few directions of H_in; two hidden units must be spent on those."""
    codes, target, start = bent()
    keys, values = torch.zeros(8, 1), torch.zeros(8, 1)
    keys[0], values[1] = 30.0, 30.0

    def project(h: Tensor) -> tuple[Tensor, Tensor]:
        return h @ keys, h @ values

    def error(metric: str) -> float:
        settings = replace(SETTINGS, width=2, metric=metric)
        patch, _ = fit_aligner(codes, target, start, settings, project)
        parts = zip(project(patch.hidden(codes)), project(target), strict=True)
        return float(sum((got - want).square().mean() / want.var() for got, want in parts))

    assert error("kv") < 0.8 * error("hidden")
    with pytest.raises(ValueError, match="projections"):
        fit_aligner(codes, target, start, replace(SETTINGS, metric="kv"))


def test_buffer_is_bounded_and_pairs_stay_paired() -> None:
    """The last prompt is cut on both sides alike; guards a buffer that grows with the corpus."""
    streams = [StreamSpec(1, "h", 2), StreamSpec(3, "h", 3)]
    means, bases = [torch.zeros(4)] * 2, [torch.eye(4)[:, :2], torch.eye(4)[:, :3]]
    encoder = Encoder(streams, means, bases, code_dtype="bfloat16")
    buffer = PairBuffer(50)
    for prompt in range(3):
        codes = torch.arange(20.0).add(20 * prompt)[:, None].repeat(1, 5)
        buffer.add(codes.bfloat16(), {layer: codes[:, :4] * layer for layer in (1, 3)})
    assert buffer.full
    assert buffer.tokens == 50
    codes, hidden = buffer.pairs(encoder, 3)
    assert codes.shape == (50, 3)
    assert torch.equal(codes[:, :1] * 3, hidden[:, :1])


def test_empty_buffer_is_an_error() -> None:
    """Prompts of nothing but sinks."""
    encoder = Encoder([StreamSpec(0, "h", 1)], [torch.zeros(2)], [torch.ones(2, 1)], code_dtype="bfloat16")
    with pytest.raises(CorpusError, match="aligner"):
        PairBuffer(8).pairs(encoder, 0)
