"""Producer and specialist as Ray Serve deployments: they load, verify, and hand on. The work is done elsewhere.

What computes is imported where a replica starts: the registrar only names these classes, and starts fast so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config import PoolSettings
from deployments.logs import log_to_stderr
from deployments.names import producer_application
from deployments.request import GenerateRequest, Piece, Usage
from deployments.ticket import Ticket
from deployments.transport import open_transport
from scd_core.errors import UnsupportedModelError
from scd_core.registry import Registry
from scd_core.signature import serving_refusal

HEALTH_S = 2.0
"""A dead replica is noticed, and replaced, after this time; the default is 10."""


class ProducerReplica:
    """One producer. It stands for all specialists that were calibrated against its weights."""

    def __init__(self, name: str, settings: PoolSettings) -> None:
        """Load the producer that the artefact of specialist ``name`` speaks of.

        Raises:
            FingerprintError: the model at its source has other weights now.
        """
        from deployments.producer import Producer
        from scd_core.huggingface import load_model

        _set_up(settings)
        registry = Registry(settings.registry)
        artefact = registry.load_specialist(name)
        model = load_model(settings.producer.source or artefact.producer_source)
        artefact.verify(producer=model)
        transport = open_transport(settings.transport)
        self.producer = Producer(model, registry.load_encoder, settings.producer, transport)

    async def prepare(self, token_ids: Sequence[int], encoder_digest: str, first_page: int, pages: int) -> Ticket:
        return await self.producer.prepare(token_ids, encoder_digest, first_page, pages)

    async def release(self, lease: str) -> None:
        self.producer.release(lease)

    async def ping(self) -> None:
        """Answers at once, however much there is to compute."""

    async def stats(self) -> dict[str, int]:
        return self.producer.stats()


class SpecialistReplica:
    """One replica of a specialist."""

    def __init__(self, name: str, settings: PoolSettings) -> None:
        """Load and verify; a replica that fails here never serves.

        Raises:
            FingerprintError: the model is not the one that was calibrated.
            UnsupportedModelError: it cannot be served from pages.
            ArtefactError: the artefact is missing or damaged.
        """
        from deployments.link import ServeLink
        from deployments.specialist import Specialist
        from scd_core.huggingface import load_model

        _set_up(settings)
        artefact = Registry(settings.registry).load_specialist(name)
        model = load_model(
            settings.sources.get(name, artefact.specialist_source),
            base=settings.bases.get(name, settings.producer.source or artefact.producer_source),
            limit=settings.specialist.limit,
        )
        artefact.verify(specialist=model)
        refusal = serving_refusal(model.signature)
        if refusal:
            raise UnsupportedModelError(refusal)
        link = ServeLink(
            producer_application(artefact.producer.fingerprint),
            settings.specialist.connect_s,
            settings.specialist.cooldown_s,
        )
        self.specialist = Specialist(
            model, artefact, link, open_transport(settings.transport), settings.specialist
        )
        self.specialist.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Usage]:
        async with aclosing(self.specialist.generate(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def stats(self) -> dict[str, Any]:
        return self.specialist.stats()

    def check_health(self) -> None:
        self.specialist.check_health()

    def __del__(self) -> None:
        if hasattr(self, "specialist"):
            self.specialist.stop()


def producer_app(name: str, settings: PoolSettings) -> Application:
    """The application of the producer that specialist ``name`` was calibrated against."""
    deployment = serve.deployment(
        name="Producer",
        num_replicas=1,
        max_ongoing_requests=256,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=5,
        ray_actor_options=settings.actor_options,
    )(ProducerReplica)
    return deployment.bind(name, settings)


def specialist_app(name: str, settings: PoolSettings) -> Application:
    """The application of one specialist."""
    deployment = serve.deployment(
        name="Specialist",
        num_replicas=1,
        max_ongoing_requests=settings.specialist.max_ongoing,
        max_queued_requests=settings.specialist.max_queued,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=10,
        ray_actor_options=settings.actor_options,
    )(SpecialistReplica)
    return deployment.bind(name, settings)


def _set_up(settings: PoolSettings) -> None:
    import torch

    log_to_stderr()
    # Ray gives a replica with a tenth of a core one thread, and replicas rarely compute at once
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
