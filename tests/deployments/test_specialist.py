"""A specialist with a producer in the same process: exact answers, honest accounts, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deployments.config import SpecialistSettings
from deployments.request import GenerateRequest, Usage
from deployments.ticket import Ticket, join_pages, split_pages
from scd_core.codec import HELD_BACK, SINK_TOKENS, zero_codec
from scd_core.errors import ContextLengthError, ProducerUnavailableError, PromptError, TransportError
from scd_core.pages import coded_tokens
from tests.deployments.rig import GREEDY, Rig, answer, make_rig
from tests.scd_core.serving import native, prompt
from tests.tiny import tiny_loaded

PAGE = 32
LEAST = 2 * PAGE + HELD_BACK
"""The shortest prompt for which codes are asked for."""


def pages_of(length: int) -> int:
    """How many pages of a prompt may come from codes."""
    return coded_tokens(length, PAGE, HELD_BACK) // PAGE


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Producer and specialist of equal weights: identity codes are then the specialist's own state."""
    made = make_rig(tiny_loaded(), tiny_loaded())
    yield made
    made.close()


def own_text(rig: Rig, token_ids: list[int]) -> str:
    """What plain ``generate`` answers."""
    model = rig.specialist.model
    return str(model.tokenizer.decode(native(model, token_ids), skip_special_tokens=True))


@pytest.mark.anyio
class TestAnswers:
    @pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, LEAST - 1, LEAST, 200])
    async def test_equals_plain_generate(self, rig: Rig, length: int) -> None:
        """With codes (which are exact here) and without, around every border of a page."""
        token_ids = prompt(length)
        expected = own_text(rig, token_ids)
        assert (await rig.ask(token_ids, codes=False))[0] == expected
        text, usage = await rig.ask(token_ids)
        assert text == expected
        assert usage.pages == (pages_of(length) if length >= LEAST else 0)
        assert rig.fallbacks == {}

    async def test_account(self, rig: Rig) -> None:
        """Counts add up, sinks count as native, and a second request finds all of it cached."""
        token_ids = prompt(150)
        _, first = await rig.ask(token_ids)
        assert first.codes_tokens == pages_of(150) * PAGE - SINK_TOKENS
        assert first.cache_tokens == 0
        assert first.codes_tokens + first.cache_tokens + first.native_tokens == first.prompt_tokens == 150
        assert first.bytes > first.raw_bytes > 0  # identity codes are float32
        _, second = await rig.ask(token_ids)
        assert (second.codes_tokens, second.bytes, second.pages) == (0, 0, 0)
        assert second.cache_tokens == 4 * PAGE  # the answer's first request left one more full page
        assert len(rig.link.asked) == 1

    async def test_only_the_lacking_pages_move(self, rig: Rig) -> None:
        """The second turn of a conversation."""
        token_ids = prompt(260)
        await rig.ask(token_ids[:150])
        _, usage = await rig.ask(token_ids)
        # the first request left its own last full page behind as well, computed natively
        first, cached, all_pages = pages_of(150), 150 // PAGE, pages_of(260)
        assert rig.link.asked == [(0, first), (cached, all_pages - cached)]
        assert usage.codes_tokens == (all_pages - cached) * PAGE
        assert usage.cache_tokens == cached * PAGE
        assert rig.producer.stats()["tokens_prefilled"] == all_pages * PAGE

    async def test_codes_are_used(self) -> None:
        """Guards all of the above: codes that decode to zeros must change the answer."""
        model = tiny_loaded()
        rig = make_rig(model, tiny_loaded(), zero_codec(model.layers, model.kv_dim))
        try:
            token_ids = prompt(150)
            assert (await rig.ask(token_ids))[0] != own_text(rig, token_ids)
            # and a request that refuses codes does not read the pages that they left
            text, usage = await rig.ask(token_ids, codes=False)
            assert text == own_text(rig, token_ids)
            assert (usage.native_tokens, usage.cache_tokens, usage.codes_tokens) == (150, 0, 0)
        finally:
            rig.close()

    async def test_many_at_once(self, rig: Rig) -> None:
        """Eight requests of different lengths, each equal to its solo run; one prefix is asked for once."""
        prompts = [prompt(n) for n in (20, 70, 100, 130, 131, 200, 201)]
        shared = [prompt(200), prompt(200)]
        answers = await asyncio.gather(*(rig.ask(p) for p in [*prompts, *shared]))
        assert [text for text, _ in answers] == [own_text(rig, p) for p in [*prompts, *shared]]
        assert rig.link.asked.count((0, pages_of(200))) == 2  # of 200 and of 201, not of the two that repeat 200

    async def test_a_prompt_in_words(self, rig: Rig) -> None:
        """vllm#27515: ids are those of the specialist's own template, and nothing is added to them."""
        messages = [{"role": "user", "content": "hello " * 30}]
        tokenizer = rig.specialist.model.tokenizer
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        request = GenerateRequest("words", GREEDY, messages=messages)
        usage = [item async for item in rig.specialist.generate(request)][-1]
        assert isinstance(usage, Usage)
        assert usage.prompt_tokens == len(ids)


@pytest.mark.anyio
class TestRefusals:
    @pytest.mark.parametrize(
        "request_",
        [
            GenerateRequest("a", GREEDY, text=""),
            GenerateRequest("b", GREEDY, token_ids=[]),
            GenerateRequest("c", GREEDY, messages=[]),
            GenerateRequest("d", GREEDY, token_ids=[5, 100_000]),
        ],
        ids=lambda r: r.request_id,
    )
    async def test_prompts_that_are_none(self, rig: Rig, request_: GenerateRequest) -> None:
        """vllm#7746: refused, and the next request works."""
        with pytest.raises(PromptError):
            await anext(rig.specialist.generate(request_))
        assert (await rig.ask(prompt(40)))[0] == own_text(rig, prompt(40))

    @pytest.mark.parametrize("excess", [0, 1])
    async def test_context_length(self, rig: Rig, excess: int) -> None:
        """sglang#30233: refused before any transfer; one token less is served."""
        limit = rig.specialist.engine.context_length
        token_ids = prompt(limit - 12 + excess)
        if excess:
            with pytest.raises(ContextLengthError):
                await rig.ask(token_ids)
            assert rig.link.asked == []
        else:
            assert (await rig.ask(token_ids))[1].completion_tokens == 12


def flipped(ticket: Ticket) -> Ticket:
    pages = [bytearray(p) for p in split_pages(memoryview(ticket.parcel), ticket.sizes)]
    pages[-1][len(pages[-1]) // 2] ^= 1
    return replace(ticket, parcel=join_pages([bytes(p) for p in pages])[0])


CHANGES = {
    "digest": flipped,
    "fingerprint": lambda t: replace(t, producer="0" * 32),
    "encoder": lambda t: replace(t, encoder_digest="0" * 32),
    "transport": lambda t: replace(t, parcel=t.parcel[:-1]),
    "expired": lambda t: replace(t, lease_s=1e-9),
    "format": lambda t: replace(t, first_page=1),
}
FAULTS = {
    "producer_unavailable": ProducerUnavailableError("gone"),
    "transport": TransportError("no room"),
    "unexpected": RuntimeError("a bug"),
}


@pytest.mark.anyio
class TestFallbacks:
    """vllm#52234, llm-d#2433: whatever fails, the text is the specialist's own, and a counter says why."""

    @pytest.mark.parametrize("reason", CHANGES)
    async def test_a_ticket_that_is_wrong(self, rig: Rig, reason: str) -> None:
        rig.link.change = CHANGES[reason]
        await self.check_native(rig, reason)

    @pytest.mark.parametrize("reason", FAULTS)
    async def test_a_producer_that_fails(self, rig: Rig, reason: str) -> None:
        rig.link.fault = FAULTS[reason]
        await self.check_native(rig, reason)

    async def test_codes_of_other_tokens(self, rig: Rig) -> None:
        """Whole and well signed, but of another prompt: only the prefix hash can tell."""
        other, real = prompt(150, seed=9), rig.link.producer.prepare
        rig.link.producer.prepare = lambda ids, *rest: real(other, *rest)  # type: ignore[method-assign]
        await self.check_native(rig, "prefix")

    @staticmethod
    async def check_native(rig: Rig, reason: str) -> None:
        token_ids = prompt(150)
        text, usage = await rig.ask(token_ids)
        assert text == own_text(rig, token_ids)
        assert usage.fallback == reason
        assert usage.native_tokens == 150
        assert rig.fallbacks == {reason: 1}
        assert rig.producer.stats()["leases"] == 0

    async def test_a_producer_that_hangs(self) -> None:
        """The deadline holds, and the claim on the pages ends with it: the next request asks again."""
        settings = SpecialistSettings(cache_tokens=1024, max_batch=4, deadline_s=0.05)
        rig = make_rig(tiny_loaded(), tiny_loaded(), settings=settings)
        try:
            rig.link.gate = asyncio.Event()
            token_ids = prompt(150)
            text, usage = await rig.ask(token_ids)
            assert (text, usage.fallback) == (own_text(rig, token_ids), "timeout")
            rig.link.gate.set()
            await rig.ask(prompt(150, seed=4))
            assert len(rig.link.asked) == 2
        finally:
            rig.close()

    async def test_no_room(self) -> None:
        """A cache too full for all decoded pages: the rest is prefilled, and the answer is still right."""
        settings = SpecialistSettings(cache_tokens=512, max_batch=4)
        rig = make_rig(tiny_loaded(), tiny_loaded(), settings=settings)
        try:
            token_ids = prompt(500)
            text, usage = await rig.ask(token_ids, max_tokens=4)
            assert usage.fallback == "cache_full"
            assert 0 < usage.pages < pages_of(500)
            assert own_text(rig, token_ids).startswith(text)
        finally:
            rig.close()


@pytest.mark.anyio
class TestCancelling:
    async def test_a_reader_that_leaves(self, rig: Rig) -> None:
        """The generation ends with its reader; the gauges return to zero and nobody else suffers."""
        request = GenerateRequest("leaver", replace(GREEDY, max_tokens=300), token_ids=prompt(100))
        pieces = rig.specialist.generate(request)
        await anext(pieces)
        assert rig.specialist.stats()["in_flight"] == 1
        await pieces.aclose()
        assert (await rig.ask(prompt(60)))[0] == own_text(rig, prompt(60))
        stats = rig.specialist.stats()
        assert stats["in_flight"] == stats["engine"]["running"] == stats["engine"]["waiting"] == 0

    async def test_a_reader_that_leaves_during_the_transfer(self, rig: Rig) -> None:
        """sglang#24578: others who wait for the same pages fetch them themselves."""
        rig.link.gate = asyncio.Event()
        token_ids = prompt(150)
        leaver = asyncio.create_task(answer(rig.specialist, token_ids))
        while not rig.link.asked:
            await asyncio.sleep(0)
        stayer = asyncio.create_task(answer(rig.specialist, token_ids))
        await asyncio.sleep(0)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        rig.link.gate.set()
        text, usage = await stayer
        assert text == own_text(rig, token_ids)
        assert usage.pages == pages_of(150)
