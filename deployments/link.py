"""A specialist's way to its producer: who it is, whether it answers, and Ray's errors as ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.ticket import Ticket
from scd_core.errors import ProducerUnavailableError, SCDError


class ProducerLink(Protocol):
    """What a specialist needs of a producer."""

    async def prepare(self, token_ids: Sequence[int], encoder_digest: str, first_page: int, pages: int) -> Ticket:
        """See ``Producer.prepare``.

        Raises:
            ProducerUnavailableError: it cannot be reached; said soon, not after the deadline.
            SCDError: it refused.
        """

    async def release(self, lease: str) -> None:
        """Tell the producer that a ticket is redeemed. Never fails."""


class ServeLink:
    """Reaches a producer's Serve application.

    A call to an application without a live replica would wait until there is one. So a producer that was not heard
    of for ``fresh_s`` is first asked whether it is there, with a short limit; one that is not is left alone for
    ``cooldown_s``, and every request in that time is told so at once.
    """

    def __init__(self, application: str, connect_s: float, cooldown_s: float, fresh_s: float = 1.0) -> None:
        self._application = application
        self._connect_s = connect_s
        self._cooldown_s = cooldown_s
        self._fresh_s = fresh_s
        self._handle: Any = None
        self._heard = self._missed = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def prepare(self, token_ids: Sequence[int], encoder_digest: str, first_page: int, pages: int) -> Ticket:
        await self._ensure_there()
        ticket: Ticket = await self._call("prepare", list(token_ids), encoder_digest, first_page, pages)
        self._heard = time.monotonic()
        return ticket

    async def release(self, lease: str) -> None:
        task = asyncio.create_task(self._release(lease))  # nobody waits for it
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease: str) -> None:
        with suppress(SCDError, TimeoutError):
            async with asyncio.timeout(self._connect_s):
                await self._call("release", lease)

    async def _ensure_there(self) -> None:
        now = time.monotonic()
        if now - self._heard < self._fresh_s:
            return
        if now - self._missed < self._cooldown_s:
            raise ProducerUnavailableError(f"{self._application} did not answer a moment ago")
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)  # many requests may wait for the one question

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                await self._call("ping")
        except TimeoutError:
            self._missed = time.monotonic()
            raise ProducerUnavailableError(
                f"{self._application} did not answer within {self._connect_s} s"
            ) from None
        except ProducerUnavailableError:
            self._missed = time.monotonic()
            raise
        self._heard = time.monotonic()

    async def _call(self, method: str, *args: Any) -> Any:
        response = None
        try:
            if self._handle is None:
                # asks the controller, and blocks meanwhile
                self._handle = await asyncio.to_thread(serve.get_app_handle, self._application)
            response = getattr(self._handle, method).remote(*args)
            return await response
        except asyncio.CancelledError:
            if response is not None:
                with suppress(RayError, RayServeException):  # it had failed already
                    response.cancel()
            raise
        except (RayError, RayServeException) as error:
            ours = translated(error, self._application)
            if ours is error:
                raise
            raise ours from error


def translated(error: Exception, application: str) -> Exception:
    """An error of Ray or from the other side as one of ours, where there is one."""
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and isinstance(cause, (SCDError, TimeoutError)):
        return cause
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return error
    return ProducerUnavailableError(f"{application}: {type(error).__name__}")
