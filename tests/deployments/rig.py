"""A producer and a specialist in one process, tied by a link that can be made to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.config import ProducerSettings, SpecialistSettings
from deployments.producer import Producer
from deployments.request import GenerateRequest, Piece, Usage
from deployments.specialist import Specialist
from deployments.ticket import Ticket
from deployments.transport import InlineTransport
from scd_core.codec import Decoder, Encoder, identity_codec
from scd_core.huggingface import LoadedModel
from scd_core.registry import SpecialistArtefact
from scd_core.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@dataclass
class Link:
    """Calls a producer; ``fault`` is raised, ``gate`` waited for and ``change`` applied to tickets, if given."""

    producer: Producer
    fault: Exception | None = None
    gate: asyncio.Event | None = None
    change: Callable[[Ticket], Ticket] = lambda ticket: ticket
    asked: list[tuple[int, int]] = field(default_factory=list)

    async def prepare(self, token_ids: Sequence[int], encoder_digest: str, first_page: int, pages: int) -> Ticket:
        self.asked.append((first_page, pages))
        if self.gate is not None:
            await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return self.change(await self.producer.prepare(token_ids, encoder_digest, first_page, pages))

    async def release(self, lease: str) -> None:
        self.producer.release(lease)


@dataclass
class Rig:
    """What a test drives."""

    producer: Producer
    specialist: Specialist
    link: Link

    async def ask(self, token_ids: Sequence[int], *, codes: bool = True, **params: Any) -> tuple[str, Usage]:
        """The whole answer and its usage."""
        return await answer(self.specialist, token_ids, codes=codes, **params)

    @property
    def fallbacks(self) -> dict[str, int]:
        return dict(self.specialist.stats()["fallbacks"])

    def close(self) -> None:
        self.specialist.stop()
        self.producer.close()


async def answer(
    specialist: Specialist, token_ids: Sequence[int], *, codes: bool = True, **params: Any
) -> tuple[str, Usage]:
    """The whole answer of a specialist and its usage."""
    number = specialist.counters["requests"]
    request = GenerateRequest(
        f"r{number}-{id(token_ids)}", replace(GREEDY, **params), token_ids=token_ids, codes=codes
    )
    items = [item async for item in specialist.generate(request)]
    usage = items.pop()
    assert isinstance(usage, Usage)
    return "".join(item.text for item in items if isinstance(item, Piece)), usage


def artefact_of(
    producer: LoadedModel, specialist: LoadedModel, codec: tuple[Encoder, Decoder] | None = None, name: str = "one"
) -> SpecialistArtefact:
    """An artefact of the identity codec, or another one."""
    encoder, decoder = codec or identity_codec(producer.layers, producer.kv_dim)
    return SpecialistArtefact(
        name, producer.source, specialist.source, producer.signature, specialist.signature, encoder, decoder
    )


def make_producer(
    model: LoadedModel, artefact: SpecialistArtefact, settings: ProducerSettings | None = None
) -> Producer:
    """A producer that knows one encoder."""
    return Producer(
        model,
        {artefact.encoder.digest: artefact.encoder}.__getitem__,
        settings or ProducerSettings(),
        InlineTransport(),
    )


def make_rig(
    producer: LoadedModel,
    specialist: LoadedModel,
    codec: tuple[Encoder, Decoder] | None = None,
    settings: SpecialistSettings | None = None,
) -> Rig:
    """A started rig; close it."""
    artefact = artefact_of(producer, specialist, codec)
    made = make_producer(producer, artefact)
    link = Link(made)
    settings = settings or SpecialistSettings(cache_tokens=2048, max_batch=8)
    served = Specialist(specialist, artefact, link, InlineTransport(), settings)
    served.start()
    return Rig(made, served, link)
