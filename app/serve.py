"""Brings a pool up on this machine or on a cluster: Ray, the registrar, the HTTP interface; and down again.

A running pool leaves a note in ``$SCD_HOME/pool.json`` (readable by its owner only): its address and the token
with which ``scd register`` has it take up new specialists.
"""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.config import PoolSettings
from deployments.names import REGISTRAR, Standing
from scd_core.errors import PoolError
from scd_core.home import home

Say = Callable[[str], None]

API = "api"
START_S = 600.0
"""A pool that has not started in this time will not."""

RAY_ATTEMPTS = 3
OBJECT_STORE_BYTES = 512 << 20
POLL_S = 0.5


@dataclass(frozen=True)
class PoolNote:
    """What other commands need to know of a running pool."""

    url: str
    registry: str
    token: str

    @staticmethod
    def path() -> Path:
        return home() / "pool.json"

    @classmethod
    def read(cls) -> PoolNote | None:
        """The note of a pool that runs, or ran; None when there is none that can be read."""
        try:
            return cls(**json.loads(cls.path().read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the note while the context lasts."""
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file)
        try:
            yield
        finally:
            if self.read() == self:  # not another pool's that came meanwhile
                path.unlink(missing_ok=True)


@contextmanager
def running_ray(address: str | None = None, **options: Any) -> Iterator[None]:
    """Ray while the context lasts: of its own on this machine, or that of a cluster.

    Args:
        address: of a running cluster, such as "auto"; None starts one here that nobody else reaches.
    """
    if address is None:
        # a token that lies about from a cluster would be demanded here as well
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    local: dict[str, Any] = {
        "address": "local",
        "num_cpus": max(8, os.cpu_count() or 1),  # logical: replicas that wait use none
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    chosen = {"address": address} if address else local
    for attempt in range(RAY_ATTEMPTS):
        try:
            ray.init(**{"log_to_driver": False, "logging_level": "warning", **chosen, **options})
            break
        except Exception as error:
            # Ray waits 30 s for its own processes, which a busy machine exceeds, and has no setting for it
            if "timed out during startup" not in str(error) or attempt == RAY_ATTEMPTS - 1:
                raise
            ray.shutdown()
    try:
        yield
    finally:
        # Ray reports the end of Serve's controller as a failure
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            serve.shutdown()
            ray.shutdown()


def deploy(settings: PoolSettings, host: str, port: int, token: str, say: Say) -> list[Standing]:
    """Start everything on the Ray at hand; returns how every specialist stands. HTTP opens when all have started.

    Raises:
        PoolError: not in time.
    """
    from ray import serve

    from deployments.registrar import registrar_app

    serve.start(http_options={"host": host, "port": port})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # this process's own; replicas log as before
    handle = serve.run(registrar_app(settings), name=REGISTRAR, route_prefix=None)
    standings = _reconciled(handle, say)
    serve.run(api_app(token), name=API, route_prefix="/")
    return standings


def _reconciled(handle: Any, say: Say) -> list[Standing]:
    """Wait until every application has started or failed, saying each as it comes."""
    outcome = handle.reconcile.remote()
    said: dict[str, str] = {}
    start = time.monotonic()
    while True:
        try:
            standings: list[Standing] = outcome.result(timeout_s=POLL_S)
            done = True
        except TimeoutError:
            standings, done = handle.standings.remote().result(timeout_s=60), False
        for standing in standings:
            if said.get(standing.name) != standing.status:
                said[standing.name] = standing.status
                why = f": {standing.message}" if standing.message and not standing.serves else ""
                say(f"  {standing.name}: {standing.status} ({time.monotonic() - start:.0f} s){why}")
        if done:
            return standings
        if time.monotonic() - start > START_S:
            raise PoolError(f"not started within {START_S:.0f} s: {said}")


def api_app(token: str | None) -> Any:
    """The Serve application with the HTTP interface."""
    from ray import serve

    def build() -> Any:
        from app.api import create_app
        from deployments.logs import log_to_stderr
        from deployments.pool import ServePool

        log_to_stderr()
        return create_app(ServePool(), token=token)

    ingress = serve.ingress(build)()
    deployment = serve.deployment(
        name="Api", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=5
    )(ingress)
    return deployment.bind()


@contextmanager
def running_pool(
    settings: PoolSettings, host: str, port: int, say: Say, address: str | None = None
) -> Iterator[list[Standing]]:
    """A pool while the context lasts; gives how every specialist stands."""
    say("starting Ray" if address is None else f"joining Ray at {address}")
    note = PoolNote(
        f"http://{_reachable(host)}:{port}", str(Path(settings.registry).resolve()), secrets.token_hex(16)
    )
    with running_ray(address):
        say("loading producer and specialists")
        standings = deploy(settings, host, port, note.token, say)
        with note.left():
            yield standings


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in {"0.0.0.0", "::"} else host


def wait_for_a_signal() -> None:
    """Returns at SIGINT or SIGTERM; a second one ends the process as usual."""
    import signal
    import threading

    asked = threading.Event()
    before: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        for known, handler in before.items():
            signal.signal(known, handler)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    while not asked.wait(1.0):  # a wait without limit would not let the handler run
        pass
