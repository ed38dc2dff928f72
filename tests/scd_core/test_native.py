"""Requests that want the model's own answer, whatever lies in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scd_core.capture import ContentKV
from scd_core.engine import Engine, TokenEvent
from tests.scd_core.serving import GREEDY, collect, native, prompt
from tests.tiny import tiny_loaded


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(tiny_loaded(max_position_embeddings=2048), cache_tokens=4096)
    made.start()
    yield made
    made.stop()


def poison(engine: Engine, token_ids: list[int]) -> None:
    """Pages that would change any answer."""
    shape = (engine.model.layers, len(token_ids), engine.model.kv_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    assert engine.seed(token_ids, 0, ContentKV(noise, noise)) == len(token_ids)


@pytest.mark.anyio
@pytest.mark.parametrize("length", [90, 1100])
async def test_cached_pages_are_not_used(engine: Engine, length: int) -> None:
    """1,100 tokens are prefilled in steps: after the first of them a completed page must not be exchanged for the
    cached one of the same hash, as the library does for ordinary requests."""
    token_ids = prompt(length)
    poison(engine, token_ids[: length // 32 * 32])
    own = await collect(engine.stream(token_ids, GREEDY, native=True))
    assert [e.token_id for e in own] == native(engine.model, token_ids)
    assert own[0].cached_tokens == 0
    shared = await collect(engine.stream(token_ids, GREEDY))
    assert [e.token_id for e in shared] != [e.token_id for e in own]  # the poison works


@pytest.mark.anyio
async def test_no_page_is_left(engine: Engine) -> None:
    """A request without codes must not warm the cache for one with them: measurements compare the two."""
    token_ids = prompt(100)
    before = engine.stats()["free_pages"]
    events: list[TokenEvent] = await collect(engine.stream(token_ids, GREEDY, native=True))
    assert len(events) == 12
    assert engine.cached_tokens(token_ids) == 0
    await collect(engine.stream([5], GREEDY, native=True))  # by then the engine has freed the first one's pages
    assert engine.stats()["free_pages"] >= before - 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
