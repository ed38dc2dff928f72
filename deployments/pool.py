"""The pool as its clients see it: specialists by name. Knows Ray and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from deployments.names import PRODUCER, REGISTRAR, SPECIALIST, Standing, specialist_application
from deployments.request import GenerateRequest, Piece, Usage
from scd_core.errors import OverloadedError, SCDError, SpecialistUnavailableError, UnknownSpecialistError


class Pool(Protocol):
    """What the face needs."""

    async def standings(self) -> Sequence[Standing]:
        """Every specialist of the registry, and how it stands."""

    def generate(self, name: str, request: GenerateRequest) -> AsyncGenerator[Piece | Usage]:
        """The answer of a specialist: its pieces, and last its usage.

        Raises:
            UnknownSpecialistError, SpecialistUnavailableError, OverloadedError: nothing was generated.
            SCDError: the specialist refused or failed.
        """

    async def reconcile(self, retry: str | None = None) -> Sequence[Standing]:
        """Serve what the registry holds; returns the outcome, when every application has started or failed.

        Args:
            retry: this one again, if it failed before.
        """

    async def stats(self) -> dict[str, Any]:
        """Counters of all producers and specialists."""


class ServePool:
    """The pool of the Serve instance that this process belongs to."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    async def standings(self) -> Sequence[Standing]:
        found: list[Standing] = await (await self._handle(REGISTRAR)).standings.remote()
        return found

    async def reconcile(self, retry: str | None = None) -> Sequence[Standing]:
        found: list[Standing] = await (await self._handle(REGISTRAR)).reconcile.remote(retry)
        self._handles.clear()  # of specialists that are gone, requests would only fail
        return found

    async def generate(self, name: str, request: GenerateRequest) -> AsyncGenerator[Piece | Usage]:
        started = False
        for attempt in (1, 2):
            response = None
            try:
                handle = await self._specialist(name)
                response = handle.options(stream=True).generate.remote(request)
                async for piece in response:
                    started = True
                    yield piece
                return
            except RayTaskError as error:
                raise _cause(error) from error
            except BackPressureError as error:
                raise OverloadedError(f"{name}: too many requests wait already") from error
            except (RayError, RayServeException) as error:
                self._handles.pop(specialist_application(name), None)
                # a replica died: another takes over, unless the client has seen a part of the answer
                if started or attempt == 2 or not isinstance(error, RayActorError):
                    raise SpecialistUnavailableError(await self._why(name, error)) from error
            except (GeneratorExit, asyncio.CancelledError):
                if response is not None:
                    with suppress(RayError, RayServeException):  # it had failed already
                        response.cancel()
                raise

    async def stats(self) -> dict[str, Any]:
        names: list[str] = await (await self._handle(REGISTRAR)).running.remote()
        found = await asyncio.gather(*map(self._stats, names))
        return {
            kind: {n.removeprefix(prefix): s for n, s in zip(names, found, strict=True) if n.startswith(prefix)}
            for kind, prefix in (("producers", PRODUCER), ("specialists", SPECIALIST))
        }

    async def _stats(self, application: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(STATS_S):
                found: dict[str, Any] = await (await self._handle(application)).stats.remote()
                return found
        except (RayError, RayServeException, TimeoutError) as error:
            return {"error": type(error).__name__}

    async def _specialist(self, name: str) -> Any:
        application = specialist_application(name)
        if application not in self._handles:
            standing = next((s for s in await self.standings() if s.name == name), None)
            if standing is None:
                raise UnknownSpecialistError(f"there is no model {name!r}")
            if not standing.serves:
                raise SpecialistUnavailableError(f"model {name!r} does not serve: {standing.why}")
        return await self._handle(application)

    async def _handle(self, application: str) -> Any:
        if application not in self._handles:
            # asks the controller, and blocks meanwhile
            self._handles[application] = await asyncio.to_thread(serve.get_app_handle, application)
        return self._handles[application]

    async def _why(self, name: str, error: Exception) -> str:
        try:
            standing = next((s for s in await self.standings() if s.name == name), None)
        except (RayError, RayServeException):
            standing = None
        if standing is None or standing.serves:
            return f"model {name!r} failed: {type(error).__name__}"
        return f"model {name!r} does not serve: {standing.why}"


STATS_S = 5.0
"""A replica that does not say its counters in this time is reported as such."""


def _cause(error: RayTaskError) -> Exception:
    """The specialist's own error, without Ray's wrapping and traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SCDError) else error
