"""The one place where applications are made and removed: it brings what is served in line with the registry.

A Serve application per specialist, and one per producer. What runs already is left alone: ``serve.run`` of an
identical application would restart it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, RunTarget

from deployments.config import PoolSettings
from deployments.names import PRODUCER, SPECIALIST, Standing, producer_application, specialist_application
from deployments.replicas import producer_app, specialist_app
from scd_core.errors import SCDError
from scd_core.registry import Registry, SpecialistArtefact

log = logging.getLogger("scd.registrar")

LEFT_ALONE = {"RUNNING", "DEPLOYING", "UNHEALTHY"}
"""Serve itself brings an unhealthy application back."""

POLL_S = 0.2


class Registrar:
    """Runs as one replica; reconciles when it starts and whenever it is asked to."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._registry = Registry(settings.registry)
        self._lock = asyncio.Lock()
        self._refused: dict[str, str] = {}
        self._versions: dict[str, bytes] = {}
        self._first = asyncio.create_task(self.reconcile())

    async def reconcile(self) -> list[Standing]:
        """Serve what the registry holds and is not served, remove what it no longer holds; returns the outcome."""
        async with self._lock:
            artefacts = await asyncio.to_thread(self._artefacts)
            wanted = self._applications(artefacts)
            there = await asyncio.to_thread(_statuses)
            gone = [name for name in there if name.startswith((SPECIALIST, PRODUCER)) and name not in wanted]
            for name in gone:
                log.info("removing %s", name)
                await asyncio.to_thread(serve.delete, name)
            versions = {name: self._version(name) for name in artefacts}
            changed = {n for n, version in versions.items() if self._versions.get(n, version) != version}
            fresh = [
                RunTarget(application, name, route_prefix=None)
                for name, application in wanted.items()
                if there.get(name, ("", ""))[0] not in LEFT_ALONE or name in map(specialist_application, changed)
            ]
            self._versions = versions
            if fresh:
                log.info("starting %s", ", ".join(target.name for target in fresh))
                await asyncio.to_thread(
                    serve.run_many,
                    fresh,
                    wait_for_ingress_deployment_creation=False,
                    wait_for_applications_running=False,
                )
            while any(status == "DEPLOYING" for status, _ in (await asyncio.to_thread(_statuses)).values()):
                await asyncio.sleep(POLL_S)
        return await self.standings()

    async def standings(self) -> list[Standing]:
        """Every specialist of the registry, and how it stands."""
        statuses = await asyncio.to_thread(_statuses)
        names = await asyncio.to_thread(self._registry.list)
        return [self._standing(name, statuses) for name in names]

    def _standing(self, name: str, statuses: Mapping[str, tuple[str, str]]) -> Standing:
        if name in self._refused:
            return Standing(name, "REFUSED", self._refused[name])
        status, message = statuses.get(specialist_application(name), ("UNKNOWN", ""))
        return Standing(name, status, "" if status == "RUNNING" else cause_of(message))

    def _artefacts(self) -> dict[str, SpecialistArtefact]:
        found, self._refused = {}, {}
        for name in self._registry.list():
            try:
                found[name] = self._registry.load_specialist(name)
            except SCDError as error:
                log.error("specialist %s is refused: %s: %s", name, type(error).__name__, error)
                self._refused[name] = f"{type(error).__name__}: {error}"
        return found

    def _version(self, name: str) -> bytes:
        """Changes when the artefact is replaced: its manifest holds the digests of all its files."""
        manifest = Path(self._settings.registry) / "specialists" / name / "manifest.json"
        return hashlib.sha256(manifest.read_bytes()).digest()

    def _applications(self, artefacts: Mapping[str, SpecialistArtefact]) -> dict[str, Application]:
        """All applications that there should be, by name; producers first."""
        producers: dict[str, Application] = {}
        for name, artefact in artefacts.items():
            key = producer_application(artefact.producer.fingerprint)
            producers.setdefault(key, producer_app(name, self._settings))
        return producers | {specialist_application(n): specialist_app(n, self._settings) for n in artefacts}


def registrar_app(settings: PoolSettings) -> Application:
    """The registrar's own application."""
    deployment = serve.deployment(
        name="Registrar", num_replicas=1, ray_actor_options={"num_cpus": min(0.1, settings.cpus)}
    )(Registrar)
    return deployment.bind(settings)


def cause_of(message: str) -> str:
    """The line of Serve's status message that names the error, out of a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":", 1)[0].split(".")[-1].endswith("Error")]
    return (named or lines or [""])[-1]


def _statuses() -> dict[str, tuple[str, str]]:
    """Serve's applications: name to status and message."""
    applications: Mapping[str, Any] = serve.status().applications
    return {name: (str(a.status.value), _message(a)) for name, a in applications.items()}


def _message(application: Any) -> str:
    parts = [application.message, *(d.message for d in application.deployments.values())]
    return "\n".join(part for part in parts if part)
