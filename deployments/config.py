"""Settings of the pool. Frozen, checked on construction, and small enough to travel to every replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.transport import TRANSPORTS


@dataclass(frozen=True)
class ProducerSettings:
    """What a producer may use.

    Attributes:
        content_bytes: of its own keys and values, kept for prefixes that go on.
        code_bytes: of finished codes.
        chunk: tokens prefilled at a time; the state of no more than that is alive beyond what is kept.
        lease_s: how long published pages can be fetched.
        source: model to load instead of the one that the artefacts name.
    """

    content_bytes: int = 1 << 30
    code_bytes: int = 256 << 20
    chunk: int = 256
    lease_s: float = 30.0
    source: str | None = None

    def __post_init__(self) -> None:
        _require(self, content_bytes=0, code_bytes=0, chunk=1)
        _require(self, lease_s=0.001)


@dataclass(frozen=True)
class SpecialistSettings:
    """What a specialist replica may use, and how long it waits.

    Attributes:
        min_pages: fewer lacking pages are prefilled rather than asked for.
        deadline_s: from asking for codes until they are seeded; native prefill follows.
        connect_s: a producer that was not heard of lately must answer within this time.
        cooldown_s: an unreachable producer is left alone for so long.
        cache_tokens: capacity of the engine's cache.
        max_batch: requests that advance together.
        max_ongoing: requests in a replica, waiting ones included.
        max_queued: requests that wait in front of it; more are refused with 429.
        limit: longest sequence; takes off a sliding window that is never reached.
    """

    min_pages: int = 2
    deadline_s: float = 30.0
    connect_s: float = 2.0
    cooldown_s: float = 2.0
    cache_tokens: int = 32768
    max_batch: int = 32
    max_ongoing: int = 64
    max_queued: int = 128
    limit: int | None = None

    def __post_init__(self) -> None:
        _require(self, min_pages=1, cache_tokens=1, max_batch=1, max_ongoing=1, max_queued=-1)
        _require(self, deadline_s=0.0, connect_s=0.0, cooldown_s=0.0)


@dataclass(frozen=True)
class PoolSettings:
    """A whole pool.

    Attributes:
        registry: folder of calibrated specialists.
        transport: how codes move.
        cpus, gpus: logical ones that each replica with a model reserves.
        threads: of torch in each replica; None: as many as the machine has.
        sources: by specialist, the model to load instead of the one that its artefact names.
        bases: by specialist, the base model of a LoRA; the producer unless given.
    """

    registry: str
    transport: str = "object_store"
    cpus: float = 0.1
    gpus: float = 0.0
    threads: int | None = None
    producer: ProducerSettings = field(default_factory=ProducerSettings)
    specialist: SpecialistSettings = field(default_factory=SpecialistSettings)
    sources: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r} is none of {', '.join(TRANSPORTS)}")
        _require(self, cpus=0.0, gpus=0.0)
        if self.threads is not None:
            _require(self, threads=1)

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's options for a replica that loads a model."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def _require(settings: object, **least: float) -> None:
    wrong = [f"{n} is {getattr(settings, n)}, at least {v}" for n, v in least.items() if getattr(settings, n) < v]
    if wrong:
        raise ValueError(f"{type(settings).__name__}: " + "; ".join(wrong))
