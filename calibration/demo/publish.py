"""The shipped pairs: sources named ``demo:base``, ``demo:blank``, ``demo:facts``, and their artefacts.

A shipped artefact names its models so, since it cannot know where they lie on the reader's machine; published into
a registry it names folders, as every other artefact does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibration.demo.base import obtain_base
from scd_core.registry import Registry

HERE = Path(__file__).parent
SHIPPED = HERE / "registry"
PREFIX = "demo:"


def resolve(source: str) -> str:
    """A model's folder or hub id; ``demo:base`` is fetched if need be, ``demo:NAME`` lies beside this file."""
    if not source.startswith(PREFIX):
        return source
    name = source.removeprefix(PREFIX)
    return str(obtain_base() if name == "base" else HERE / name)


def shipped_names() -> list[str]:
    """Names of the artefacts that the project ships."""
    return [entry.name for entry in Registry(SHIPPED).entries()]


def publish_demo(registry: Registry) -> list[str]:
    """Copies the shipped artefacts that ``registry`` lacks, or holds with other decoders, into it.

    Returns their names. Nothing is fetched or written when all are there.
    """
    shipped = Registry(SHIPPED)
    held = {entry.name for entry in registry.entries() if entry.error is None}
    for name in shipped_names():
        artefact = shipped.load_specialist(name)
        local = replace(
            artefact,
            producer_source=resolve(artefact.producer_source),
            specialist_source=resolve(artefact.specialist_source),
        )
        if name not in held or registry.load_specialist(name).provenance != local.provenance:
            registry.save_specialist(local)
    return shipped_names()


def ship(registry: Registry, name: str) -> None:
    """The way back: copies an artefact into the project, its models named ``demo:``."""
    artefact = registry.load_specialist(name)
    specialist = PREFIX + Path(artefact.specialist_source).name
    Registry(SHIPPED).save_specialist(
        replace(artefact, producer_source=PREFIX + "base", specialist_source=specialist)
    )
