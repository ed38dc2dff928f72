"""REUSE of the paper: joint factorisation of producer and consumer states (SCD, arXiv 2606.07684).

Per stream (one layer's keys, values or hidden input), with x the producer's state and y the consumer's:

1. the shared code is the projection of [x / s_x, y / s_y] on its ``rank`` leading principal directions: no other
   rank-``rank`` code reconstructs the pair better (Eckart-Young);
2. the consumer's state is not at hand online, so the ENCODER is the ridge regression of that code on x alone;
3. the DECODER is the linear regression of y on what the encoder really sends.

The scales s are one number per state, its total standard deviation, so that both models weigh the same; a scale
per coordinate would blow up the coordinates that hardly vary. All is solved in float64 from moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibration.moments import Covariances

RANGE = 1e-12
"""Directions whose variance is below this share of the largest carry rounding errors only, and are dropped."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A stream's linear codec, float64: ``code = (x - mean) @ encoder``, ``y = code @ decoder + bias``.

    ``mean`` ``[dx]``, ``encoder`` ``[dx, r]``, ``decoder`` ``[r, dy]``, ``bias`` ``[dy]``; ``error`` is the share
    of y's variance that is lost, a number for debugging: it does not predict the quality of answers.
    """

    mean: Tensor
    encoder: Tensor
    decoder: Tensor
    bias: Tensor
    error: float

    @property
    def rank(self) -> int:
        return self.encoder.shape[1]


def joint_code(moments: Covariances, rank: int) -> Tensor:
    """The leading principal directions of the standardised pair, orthonormal: ``[dx + dy, rank]``.

    Raises:
        ValueError: ``rank`` is not in 1..dx.
    """
    if not 1 <= rank <= moments.xx.shape[0]:
        raise ValueError(f"rank {rank} is not in 1..{moments.xx.shape[0]}")
    sx, sy = scale(moments.xx), scale(moments.yy)
    xy = moments.xy / (sx * sy)
    joint = torch.cat([torch.cat([moments.xx / sx**2, xy], 1), torch.cat([xy.T, moments.yy / sy**2], 1)])
    return torch.linalg.eigh(joint)[1][:, -rank:].flip(1)


def factorise(moments: Covariances, rank: int, ridge: float) -> Factors:
    """Fits one stream.

    Args:
        ridge: penalty of the encoder, in units of x's mean variance; 0 gives the least squares of least norm.
    """
    basis = joint_code(moments, rank)
    dx = moments.xx.shape[0]
    # covariance of x with the shared code
    shared = moments.xx @ basis[:dx] / scale(moments.xx) + moments.xy @ basis[dx:] / scale(moments.yy)
    encoder = ridge_solve(moments.xx, shared, ridge)
    sent = encoder.T @ moments.xx @ encoder
    decoder = ridge_solve(sent, encoder.T @ moments.xy, 0.0)
    explained = (decoder * (encoder.T @ moments.xy)).sum()
    total = moments.yy.trace()
    return Factors(
        moments.mean_x, encoder, decoder, moments.mean_y, float(1 - explained / total) if total > 0 else 0.0
    )


def ridge_solve(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """``(gram + ridge * mean(diag) * I)^-1 target`` on the range of ``gram``, ``[d, d]`` and ``[d, m]``.

    A singular ``gram`` is no special case: directions without variance get weight zero.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram)
    kept = eigenvalues > RANGE * eigenvalues[-1].clamp_min(torch.finfo(torch.float64).tiny)
    penalised = eigenvalues + ridge * gram.diagonal().mean()
    inverse = torch.where(kept, penalised, 1.0).reciprocal() * kept
    return vectors @ (inverse[:, None] * (vectors.T @ target))


def scale(covariance: Tensor) -> Tensor:
    """Total standard deviation; 1 for a state that never varies."""
    total = covariance.trace().clamp_min(0.0).sqrt()
    return torch.where(total > 0, total, torch.ones_like(total))
