"""The command line's options as settings; what is refused, is refused here with its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from calibration.calibrate import CalibrationSettings, Method
from calibration.distill import DistillSettings
from calibration.klt import KltSettings
from calibration.paper import PaperSettings
from scd_core.errors import CorpusError


def settings_of(
    *,
    method: str,
    steps: int | None,
    step: float | None,
    answer_weight: float | None,
    continuation: float | None,
    decoder_rank: int | None,
    ranks: tuple[int | None, int | None, int | None],
    patch: str,
    max_tokens: int,
    held_out: float,
    seed: int,
) -> CalibrationSettings:
    """Settings of one calibration; None leaves a default.

    Raises:
        CorpusError: an option's value is not one that it takes.
    """
    if method not in get_args(Method):
        raise CorpusError(f"--method {method}: one of {', '.join(get_args(Method))}")
    if step is not None and step <= 0:
        raise CorpusError(f"--step {step}: must be positive")
    layers: Any = "auto"
    if patch != "auto":
        try:
            layers = tuple(sorted({int(part) for part in patch.split(",")}))
        except ValueError:
            raise CorpusError(f"--patch {patch}: 'auto', or layers such as 3,17") from None
    distill = DistillSettings(seed=seed)
    if steps is not None:
        distill = replace(distill, steps=steps)
    if answer_weight is not None:
        distill = replace(distill, answer_weight=answer_weight)
    if continuation is not None:
        distill = replace(distill, continuation=continuation)
    if decoder_rank is not None:
        distill = replace(distill, rank=decoder_rank or None)
    return CalibrationSettings(
        method=method,  # type: ignore[arg-type]
        held_out=held_out,
        seed=seed,
        max_tokens=max_tokens,
        klt=KltSettings() if step is None else KltSettings(step=step),
        distill=distill,
        paper=PaperSettings(rank_k=ranks[0], rank_v=ranks[1], rank_h=ranks[2], patch=layers, seed=seed),
    )
