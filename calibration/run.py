"""One calibration as a person asks for it: names resolved, state kept for a restart, the result said in words."""

from __future__ import annotations

from pathlib import Path

from calibration.calibrate import CalibrationSettings, calibrate
from calibration.demo.publish import resolve
from scd_core.home import home
from scd_core.registry import Registry


def calibrate_pair(
    name: str | None,
    producer: str,
    specialist: str,
    corpus: str,
    registry: Path,
    settings: CalibrationSettings,
    base: str | None = None,
    start_from: str | None = None,
) -> None:
    """Calibrates and publishes ``name`` (default: the specialist's folder's name, ``--METHOD`` behind it for the
    paper's methods), and prints what was measured on held-out documents.

    Raises:
        as :func:`calibration.calibrate.calibrate`.
    """
    suffix = "" if settings.method == "distilled" else f"--{settings.method}"
    chosen = name or Path(resolve(specialist)).name.lower() + suffix
    producer = resolve(producer)
    artefact = calibrate(
        chosen,
        producer,
        resolve(specialist),
        corpus,
        Registry(registry),
        settings,
        workdir=home() / "work",
        base=resolve(base) if base else producer,
        start_from=start_from,
    )
    measured = artefact.report["held_out"]
    print(
        f"{chosen}: {measured['bytes_per_token']:.0f} bytes per token, {measured['bytes_ratio']:.3f} of raw BF16; "
        f"KL median {measured['kl_median']:.4f}, mean {measured['kl_mean']:.4f} nats over {measured['prefixes']} "
        f"held-out prefixes.\nPublished in {registry}; serve it with: scd serve --registry {registry}"
    )
