"""The one place where applications are made and removed: it brings what is served in line with the registry.

A Serve application per specialist, and one per producer. What runs already is left alone: ``serve.run`` of an
identical application would restart it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ray import serve
from ray.serve import Application, RunTarget

from deployments.config import PoolSettings
from deployments.logs import log_to_stderr
from deployments.names import PRODUCER, SPECIALIST, Standing, producer_application, specialist_application
from deployments.replicas import producer_app, specialist_app
from scd_core.errors import SCDError
from scd_core.registry import Registry, SpecialistArtefact

R = TypeVar("R")

log = logging.getLogger("scd.registrar")

LEFT_ALONE = {"RUNNING", "DEPLOYING", "UNHEALTHY", "DEPLOY_FAILED"}
"""Serve itself brings an unhealthy one back. One that failed to start would fail again, if nothing has changed."""

POLL_S = 0.2


class Registrar:
    """Runs as one replica; reconciles when it starts and whenever it is asked to."""

    def __init__(self, settings: PoolSettings) -> None:
        log_to_stderr()
        self._settings = settings
        self._registry = Registry(settings.registry)
        self._lock = asyncio.Lock()
        # Serve's configurations change a global table while they are made and read: never two at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scd-registrar")
        self._refused: dict[str, str] = {}
        self._versions: dict[str, bytes] = {}
        self._first = asyncio.create_task(self.reconcile())

    async def reconcile(self, retry: str | None = None) -> list[Standing]:
        """Serve what the registry holds and is not served, remove what it no longer holds; returns the outcome.

        Args:
            retry: a specialist that may have failed for reasons outside the registry, and is tried again.
        """
        async with self._lock:
            artefacts = await self._alone(self._artefacts)
            wanted = await self._alone(self._applications, artefacts)
            there = await self._alone(_statuses)
            gone = [name for name in there if name.startswith((SPECIALIST, PRODUCER)) and name not in wanted]
            for name in gone:
                log.info("removing %s", name)
                await self._alone(serve.delete, name)
            # of what ran before this registrar nothing is known: it is taken to be current
            versions = {name: self._version(name) for name in artefacts}
            changed = {n for n, version in versions.items() if self._versions.get(n, version) != version}
            again = set(map(specialist_application, changed))
            if retry is not None and there.get(specialist_application(retry), ("", ""))[0] == "DEPLOY_FAILED":
                again.add(specialist_application(retry))
            fresh = [
                RunTarget(application, name, route_prefix=None)
                for name, application in wanted.items()
                if there.get(name, ("", ""))[0] not in LEFT_ALONE or name in again
            ]
            self._versions = versions
            if fresh:
                log.info("starting %s", ", ".join(target.name for target in fresh))
                await self._alone(_run, fresh)
            while any(status == "DEPLOYING" for status, _ in (await self._alone(_statuses)).values()):
                await asyncio.sleep(POLL_S)
        return await self.standings()

    async def _alone(self, work: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def standings(self) -> list[Standing]:
        """Every specialist of the registry, and how it stands."""
        statuses = await self._alone(_statuses)
        names = await self._alone(self._registry.list)
        return [self._standing(name, statuses) for name in names]

    async def running(self) -> list[str]:
        """The applications of producers and specialists that run."""
        statuses = await self._alone(_statuses)
        ours = (SPECIALIST, PRODUCER)
        return [name for name, (status, _) in statuses.items() if name.startswith(ours) and status == "RUNNING"]

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


def _run(targets: list[RunTarget]) -> None:
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _statuses() -> dict[str, tuple[str, str]]:
    """Serve's applications: name to status and message."""
    applications: Mapping[str, Any] = serve.status().applications
    return {name: (str(a.status.value), _message(a)) for name, a in applications.items()}


def _message(application: Any) -> str:
    parts = [application.message, *(d.message for d in application.deployments.values())]
    return "\n".join(part for part in parts if part)
