"""The joint factorisation's defining properties, on covariances of data made for each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from calibration.factorise import factorise, joint_code, ridge_solve, scale
from calibration.moments import Covariances, PairMoments


def covariances(x: Tensor, y: Tensor) -> Covariances:
    moments = PairMoments(1, x.shape[1], y.shape[1])
    moments.update(x[None], y[None])
    return moments.of(0)


def random_pair(dx: int = 12, dy: int = 10, tokens: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dx, dx, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, dx, generator=generator, dtype=torch.float64) @ mix + 3
    turn = torch.randn(dx, dy, generator=generator, dtype=torch.float64)
    return x, x @ turn + torch.randn(tokens, dy, generator=generator, dtype=torch.float64) - 1


def predict(x: Tensor, factors) -> Tensor:
    return (x - factors.mean) @ factors.encoder @ factors.decoder + factors.bias


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_full_rank_of_equal_states_is_the_identity(ridge: float) -> None:
    """Guards scales, centring and the decoder's regression: a ridge must not shrink what is decoded."""
    x, _ = random_pair()
    factors = factorise(covariances(x, x), x.shape[1], ridge)
    assert torch.allclose(predict(x, factors), x, atol=1e-8)
    assert factors.error < 1e-12


def test_joint_code_reconstructs_better_than_any_other_projection() -> None:
    """Eckart-Young: guards taking the smallest directions, or those of x or y alone."""
    x, y = random_pair()
    moments = covariances(x, y)
    pair = torch.cat([(x - moments.mean_x) / scale(moments.xx), (y - moments.mean_y) / scale(moments.yy)], 1)
    basis = joint_code(moments, 4)
    assert torch.allclose(basis.T @ basis, torch.eye(4, dtype=torch.float64), atol=1e-10)

    def lost(q: Tensor) -> float:
        return float((pair - pair @ q @ q.T).square().sum() / len(pair))

    tail = torch.linalg.svdvals(pair)[4:].square().sum() / len(pair)
    assert lost(basis) == pytest.approx(float(tail), rel=1e-8)
    for seed in range(50):
        draw = torch.randn(22, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert lost(basis) < lost(torch.linalg.qr(draw)[0])


def test_low_rank_codec_beats_random_encoders_with_optimal_decoders() -> None:
    """With equal states the best code of rank r is the principal one; guards an encoder that leaves it."""
    x, _ = random_pair()
    moments = covariances(x, x)
    error = (predict(x, factorise(moments, 3, 1e-8)) - x).square().mean()
    centred = x - x.mean(0)
    for seed in range(50):
        draw = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        fitted = centred @ draw @ torch.linalg.lstsq(centred @ draw, centred).solution
        assert error < (fitted - centred).square().mean()


def test_code_keeps_what_the_consumer_reads_though_the_producer_hardly_varies_there() -> None:
    """Guards a factorisation of the producer's state alone: its principal directions lose all of y here."""
    draws = torch.randn(2000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = draws * torch.tensor([5.0, 5.0, 5.0, 5.0, 0.1, 0.1])
    factors = factorise(covariances(x, draws[:, 4:] * 7), 2, 1e-9)
    assert factors.error < 0.01


def test_rank_trades_error_monotonically() -> None:
    """Guards ranks that pick other columns than the leading ones."""
    moments = covariances(*random_pair())
    errors = [factorise(moments, rank, 1e-8).error for rank in range(1, 13)]
    assert errors[-1] < 0.2 * errors[0]
    assert all(after <= before + 1e-3 for before, after in pairwise(errors))


@pytest.mark.parametrize("ridge", [0.0, 1e-4])
def test_singular_covariance_is_solved(ridge: float) -> None:
    """A dead channel and a copied one (tied heads) make Cov(x) singular: a plain solve raises or explodes."""
    x, y = random_pair()
    singular = torch.cat([x, x[:, :2], torch.full((len(x), 1), 7.0, dtype=torch.float64)], 1)
    factors = factorise(covariances(singular, y), 10, ridge)
    assert torch.isfinite(factors.encoder).all()
    assert factors.encoder.abs().max() < 1e3
    assert factors.encoder[-1].abs().max() < 1e-6
    plain = factorise(covariances(x, y), 10, ridge)
    assert factors.error == pytest.approx(plain.error, abs=0.02)


def test_constant_states_decode_to_their_mean() -> None:
    """Zero variance divides by zero unless it is handled."""
    x = torch.full((50, 4), 2.0, dtype=torch.float64)
    factors = factorise(covariances(x, -x), 2, 1e-4)
    assert torch.allclose(predict(x, factors), -x)


def test_ridge_solve_is_the_ridge_formula() -> None:
    """Against the closed form; guards the penalty's unit (mean variance, not 1)."""
    x, y = random_pair()
    moments = covariances(x * 100, y)
    penalty = 0.3 * moments.xx.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    assert torch.allclose(
        ridge_solve(moments.xx, moments.xy, 0.3), torch.linalg.solve(moments.xx + penalty, moments.xy)
    )


def test_codes_survive_bfloat16() -> None:
    """The codes are sent in bfloat16: collinear coefficients with huge weights would multiply it."""
    x, y = random_pair()
    x = x * torch.logspace(0, -4, 12, dtype=torch.float64)
    factors = factorise(covariances(x, y), 12, 1e-8)
    codes = ((x - factors.mean) @ factors.encoder).bfloat16().double()
    rounded = (codes @ factors.decoder + factors.bias - y).square().mean()
    assert rounded < (predict(x, factors) - y).square().mean() + 1e-4 * y.var(0).mean()


@pytest.mark.parametrize("rank", [0, 13])
def test_impossible_rank_is_refused(rank: int) -> None:
    """A rank beyond the producer's dimensions would silently give fewer columns than the stream says."""
    with pytest.raises(ValueError, match="rank"):
        factorise(covariances(*random_pair()), rank, 0.0)
