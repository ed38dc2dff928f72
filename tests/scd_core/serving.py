"""Shared by the tests of paged cache and engine: prompts, native answers, and runs of many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from scd_core.engine import Engine, TokenEvent
from scd_core.huggingface import LoadedModel, plain_shell
from scd_core.sampling import SamplingParams
from tests.tiny import tiny_ids

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return tiny_ids(length, seed=1000 * seed + length)


def native(model: LoadedModel, token_ids: Sequence[int], tokens: int = 12, shell: bool = True) -> list[int]:
    """Plain greedy ``generate``, end-of-sequence tokens ignored; of a shell that no engine has touched, or not."""
    plain = plain_shell(model.model) if shell else model.model
    with torch.no_grad():
        out = plain.generate(
            torch.tensor([list(token_ids)]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(token_ids) :].tolist()


async def collect(stream: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in stream]


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def text(events: Sequence[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def generate(
    engine: Engine, *requests: tuple[Sequence[int], SamplingParams], timeout: float = 60
) -> list[list[TokenEvent]]:
    """All requests at once; each one's events."""

    async def run() -> list[list[TokenEvent]]:
        streams = (collect(engine.stream(token_ids, params)) for token_ids, params in requests)
        return await asyncio.wait_for(asyncio.gather(*streams), timeout)

    return asyncio.run(run())


def used_pages(engine: Engine) -> int:
    """Pages that requests own. The engine has seen every earlier cancellation once a later request has run."""
    generate(engine, ([5], SamplingParams(max_tokens=1)))
    stats = engine.stats()
    return stats["total_pages"] - stats["free_pages"] - stats["cached_pages"]
