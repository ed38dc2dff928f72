"""The producer: what it prefills, keeps, shares and lets go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch

from deployments.config import ProducerSettings
from deployments.producer import Producer
from deployments.ticket import Ticket, split_pages
from deployments.transport import InlineTransport
from scd_core.capture import capture_all
from scd_core.codec import Encoder, StreamSpec, identity_codec
from scd_core.errors import ContextLengthError, PromptError
from scd_core.huggingface import LoadedModel
from scd_core.packing import Packer
from scd_core.pages import page_hashes
from scd_core.wire import read_pages
from tests.tiny import tiny_ids

PAGE = 32


def hidden_encoder(model: LoadedModel, layer: int) -> Encoder:
    """Sends H_in of one layer as it is."""
    size = model.hidden_size
    stream = StreamSpec(layer, "h", size)
    return Encoder([stream], [torch.zeros(size)], [torch.eye(size)], code_dtype="float32", page_size=PAGE)


class Rig:
    """A producer with several encoders."""

    def __init__(self, model: LoadedModel, settings: ProducerSettings | None = None) -> None:
        identity = identity_codec(model.layers, model.kv_dim)[0]
        self.encoders = {e.digest: e for e in (identity, hidden_encoder(model, 1), hidden_encoder(model, 2))}
        self.identity, self.hidden1, self.hidden2 = self.encoders.values()
        self.model = model
        self.producer = Producer(
            model, self.encoders.__getitem__, settings or ProducerSettings(chunk=64), InlineTransport()
        )

    async def codes(self, ids: Sequence[int], encoder: Encoder, first: int, pages: int) -> torch.Tensor:
        """The codes that a ticket's pages hold, all checks passed."""
        ticket = await self.producer.prepare(ids, encoder.digest, first, pages)
        self.producer.release(ticket.lease)
        return self.read(ticket, ids, encoder)

    def read(self, ticket: Ticket, ids: Sequence[int], encoder: Encoder) -> torch.Tensor:
        return read_pages(
            split_pages(memoryview(ticket.parcel), ticket.sizes),
            packer=Packer.of(encoder),
            encoder_digest=bytes.fromhex(encoder.digest),
            prefix_hashes=page_hashes(ids, PAGE)[ticket.first_page : ticket.first_page + ticket.pages],
            first_index=ticket.first_page,
        )

    def expected(self, ids: Sequence[int], encoder: Encoder, first: int, pages: int) -> torch.Tensor:
        """What one prefill of the whole prompt gives."""
        stop = (first + pages) * PAGE
        state = capture_all(self.model, ids[:stop], hidden_layers=encoder.hidden_layers)
        return encoder.encode(state)[first * PAGE :]

    def prefilled(self) -> int:
        return self.producer.stats()["tokens_prefilled"]


@pytest.fixture
def rig(tiny_llama: LoadedModel) -> Iterator[Rig]:
    made = Rig(tiny_llama)
    yield made
    made.producer.close()


@pytest.mark.anyio
class TestPrefix:
    async def test_codes_are_those_of_one_prefill(self, rig: Rig) -> None:
        """Chunks, continued prefixes and cached pages must not show."""
        ids = tiny_ids(300)
        for first, pages in ((0, 3), (3, 2), (1, 7), (8, 1)):
            got = await rig.codes(ids, rig.identity, first, pages)
            assert torch.allclose(got, rig.expected(ids, rig.identity, first, pages), atol=1e-4)

    async def test_only_what_is_new(self, rig: Rig) -> None:
        ids = tiny_ids(300)
        await rig.codes(ids, rig.identity, 0, 4)
        assert rig.prefilled() == 4 * PAGE
        await rig.codes(ids, rig.identity, 2, 2)
        assert rig.prefilled() == 4 * PAGE
        await rig.codes(ids, rig.identity, 6, 2)
        assert rig.prefilled() == 8 * PAGE
        forked = ids[: 6 * PAGE] + tiny_ids(64, seed=5)
        await rig.codes(forked, rig.identity, 0, 8)
        assert rig.prefilled() == 10 * PAGE
        stats = rig.producer.stats()
        assert (stats["prefixes_prefilled"], stats["prefixes_extended"]) == (1, 2)

    async def test_codes_of_a_second_encoder_take_no_prefill(self, rig: Rig) -> None:
        ids = tiny_ids(200)
        await rig.codes(ids, rig.hidden1, 0, 4)
        await rig.codes(ids, rig.identity, 0, 4)
        assert rig.prefilled() == 4 * PAGE

    async def test_hidden_states_that_were_not_kept(self, rig: Rig) -> None:
        """Pages without the state that an encoder reads are prefilled again, not encoded from something else."""
        ids = tiny_ids(200)
        await rig.codes(ids, rig.identity, 0, 4)
        got = await rig.codes(ids, rig.hidden2, 1, 3)
        assert torch.allclose(got, rig.expected(ids, rig.hidden2, 1, 3), atol=1e-4)
        assert rig.prefilled() == 8 * PAGE

    async def test_one_flight(self, rig: Rig) -> None:
        """Requests at once for one document with different questions prefill the document once."""
        document = tiny_ids(5 * PAGE)
        prompts = [document + tiny_ids(PAGE, seed=s) for s in (1, 2, 3)]
        got = await asyncio.gather(*(rig.codes(p, rig.identity, 0, 6) for p in prompts))
        assert rig.prefilled() == 8 * PAGE
        assert rig.producer.stats()["prefixes_prefilled"] == 1
        for prompt, codes in zip(prompts, got, strict=True):
            assert torch.allclose(codes, rig.expected(prompt, rig.identity, 0, 6), atol=1e-4)
        assert rig.producer.stats()["in_flight_pages"] == 0

    async def test_a_flight_that_is_abandoned(self, rig: Rig) -> None:
        """Those who waited make the pages themselves."""
        ids = tiny_ids(400)
        first = asyncio.create_task(rig.codes(ids, rig.identity, 0, 12))
        while rig.producer.stats()["in_flight_pages"] == 0:
            await asyncio.sleep(0)
        second = asyncio.create_task(rig.codes(ids, rig.identity, 0, 12))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert torch.allclose(await second, rig.expected(ids, rig.identity, 0, 12), atol=1e-4)
        assert rig.producer.stats()["in_flight_pages"] == 0


@pytest.mark.anyio
class TestLimits:
    @pytest.mark.parametrize(("content", "codes"), [(0, 0), (60_000, 0), (0, 60_000), (60_000, 60_000)])
    async def test_small_caches(self, tiny_llama: LoadedModel, content: int, codes: int) -> None:
        """Caches that hold little or nothing cost work, never rightness or the bound."""
        rig = Rig(tiny_llama, ProducerSettings(content_bytes=content, code_bytes=codes, chunk=64))
        try:
            ids = tiny_ids(300)
            asked = [
                rig.codes(ids, rig.identity, 0, 9),
                rig.codes(ids, rig.identity, 2, 7),
                rig.codes(ids, rig.hidden1, 0, 5),
            ]
            got = await asyncio.gather(*asked)
            assert torch.allclose(got[1], rig.expected(ids, rig.identity, 2, 7), atol=1e-4)
            stats = rig.producer.stats()
            assert stats["content_bytes"] <= content
            assert stats["code_bytes"] <= codes
        finally:
            rig.producer.close()

    @pytest.mark.parametrize(
        ("ids", "first", "pages", "error"),
        [
            (tiny_ids(63), 0, 2, PromptError),
            (tiny_ids(64), -1, 2, PromptError),
            (tiny_ids(64), 0, 0, PromptError),
            ([5] * 31 + [10**6], 0, 1, PromptError),
            ([5] * 31 + [-1], 0, 1, PromptError),
            ([5] * 640, 0, 20, ContextLengthError),
        ],
        ids=["short", "negative page", "no page", "large id", "negative id", "long"],
    )
    async def test_refusals(
        self, rig: Rig, ids: list[int], first: int, pages: int, error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            await rig.codes(ids, rig.identity, first, pages)
        assert rig.prefilled() == 0
