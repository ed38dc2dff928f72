"""The engine against plain ``generate``, under load, aborts, seeding, failures and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from scd_core.capture import ContentKV, capture_all
from scd_core.engine import Engine
from scd_core.errors import ContextLengthError, EngineError, EngineStoppedError, NonFiniteError, PromptError
from scd_core.huggingface import LoadedModel
from scd_core.sampling import SamplingParams
from tests.scd_core.serving import GREEDY, collect, generate, ids, native, prompt, text, used_pages
from tests.tiny import tiny_loaded

PAGE = 32


@contextmanager
def running(model: LoadedModel | None = None, **settings: Any) -> Iterator[Engine]:
    engine = Engine(model or tiny_loaded(), **{"cache_tokens": 4096, "max_batch": 16, **settings})
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine for tests that neither break it nor look at its pages."""
    with running() as engine:
        yield engine


@pytest.fixture(scope="module")
def model(shared: Engine) -> LoadedModel:
    return shared.model


# ----------------------------------------------------------------------------------------------- as generate


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_greedy_equals_generate_around_the_page_size(shared: Engine, model: LoadedModel, length: int) -> None:
    """Twice: natively, and with the pages that the first request left."""
    expected = native(model, prompt(length))
    first, second = (generate(shared, (prompt(length), GREEDY))[0] for _ in range(2))
    assert ids(first) == ids(second) == expected
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, (length - 1) // PAGE * PAGE)
    assert [event.finish_reason for event in first] == [None] * 11 + ["length"]


def test_concurrent_requests_equal_their_solo_runs(shared: Engine, model: LoadedModel) -> None:
    """unsloth#3699: rows of one batch whose lengths differ."""
    lengths = [3, 17, 32, 50, 64, 99, 130, 200]
    found = generate(shared, *((prompt(length, 1), GREEDY) for length in lengths))
    assert [ids(events) for events in found] == [native(model, prompt(length, 1)) for length in lengths]


def test_a_long_prompt_is_prefilled_in_pieces() -> None:
    model = tiny_loaded(max_position_embeddings=2048)
    with running(model) as engine:
        long, short = generate(engine, (prompt(1400), GREEDY), (prompt(20), GREEDY))
        assert (ids(long), ids(short)) == (native(model, prompt(1400)), native(model, prompt(20)))


def test_a_cache_too_small_for_all_requests_serves_them_all() -> None:
    """Requests are thrown out and start anew while others run; their texts and random streams go on."""
    with running(cache_tokens=8 * PAGE) as engine:
        sampled = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
        requests = [(prompt(60, seed), replace(sampled, seed=seed)) for seed in range(6)]
        together = generate(engine, *requests)
        assert [ids(events) for events in together] == [ids(generate(engine, one)[0]) for one in requests]
        assert used_pages(engine) == 0


# ----------------------------------------------------------------------------------------------- seeding


def own_content(model: LoadedModel, token_ids: list[int], start: int, stop: int) -> ContentKV:
    return capture_all(model, token_ids).content.slice(start, stop)


def test_seeding_the_models_own_content_gives_its_own_answer() -> None:
    """And the pages are really used: 36 of 100 tokens are prefilled, and zeros in their place change it."""
    token_ids = prompt(100)
    with running() as engine:
        expected = native(engine.model, token_ids)
        assert engine.seed(token_ids[:64], 0, own_content(engine.model, token_ids, 0, 64)) == 64
        assert engine.cached_tokens(token_ids) == 64
        before = engine.stats()["prefilled_tokens"]
        (events,) = generate(engine, (token_ids, GREEDY))
        assert ids(events) == expected
        assert (engine.stats()["prefilled_tokens"] - before, events[0].cached_tokens) == (36, 64)
        assert engine.seed(token_ids[:64], 0, own_content(engine.model, token_ids, 0, 64)) == 0
    with running() as engine:
        zeros = torch.zeros(engine.model.layers, 64, engine.model.kv_dim)
        assert engine.seed(token_ids[:64], 0, ContentKV(zeros, zeros)) == 64
        assert ids(generate(engine, (token_ids, GREEDY))[0]) != expected


def test_seeding_continues_after_cached_pages() -> None:
    """Keys are rotated at their own positions: content of the third page, written where the third page belongs."""
    token_ids = prompt(120)
    with running() as engine:
        expected = native(engine.model, token_ids)
        third = own_content(engine.model, token_ids, 64, 96)
        assert engine.seed(token_ids[:96], 64, third) == 0  # nothing before it is cached
        generate(engine, (token_ids[:70], GREEDY))
        assert engine.seed(token_ids[:96], 64, third) == 32
        (events,) = generate(engine, (token_ids, GREEDY))
        assert (ids(events), events[0].cached_tokens) == (expected, 96)


def test_seeding_while_others_generate(shared: Engine, model: LoadedModel) -> None:
    """Writes fall between the steps of running requests, and touch none of them."""
    running_params = replace(GREEDY, max_tokens=60)
    prefixes = [prompt(96, 50 + seed) for seed in range(6)]
    contents = [own_content(model, token_ids, 0, 64) for token_ids in prefixes]

    async def run() -> list[Any]:
        streams = [asyncio.create_task(collect(shared.stream(prompt(40, s), running_params))) for s in range(4)]
        seeds = [
            asyncio.to_thread(shared.seed, token_ids[:64], 0, content)
            for token_ids, content in zip(prefixes, contents, strict=True)
        ]
        assert await asyncio.gather(*seeds) == [64] * 6
        return await asyncio.gather(*streams)

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert [ids(events) for events in found] == [native(model, prompt(40, s), 60) for s in range(4)]
    seeded = generate(shared, *((token_ids, GREEDY) for token_ids in prefixes))
    assert [ids(events) for events in seeded] == [native(model, token_ids) for token_ids in prefixes]


def test_seeding_without_room_changes_nothing() -> None:
    with running(cache_tokens=8 * PAGE) as engine:
        token_ids = prompt(400)
        content = own_content(engine.model, token_ids, 0, 384)
        assert engine.seed(token_ids[:384], 0, content) == 0  # longer than any request may be
        written = engine.seed(token_ids[:256], 0, content.slice(0, 256))
        assert written == 6 * PAGE  # two of eight pages are kept for requests
        (events,) = generate(engine, (token_ids[:210], GREEDY))
        assert ids(events) == native(engine.model, token_ids[:210])


@pytest.mark.parametrize(
    ("tokens", "first", "content", "layers"), [(64, 0, 63, 3), (63, 0, 63, 3), (64, 16, 48, 3), (64, 0, 64, 2)]
)
def test_seeding_refuses_what_is_not_pages(
    shared: Engine, tokens: int, first: int, content: int, layers: int
) -> None:
    zeros = torch.zeros(layers, content, shared.model.kv_dim)
    with pytest.raises(ValueError, match="content"):
        shared.seed(prompt(tokens, 90), first, ContentKV(zeros, zeros))


def test_seeding_refuses_what_is_not_finite(shared: Engine) -> None:
    values = torch.zeros(shared.model.layers, 32, shared.model.kv_dim)
    keys = values.clone()
    keys[1, 31, 3] = float("inf")  # rotation makes NaN of it
    with pytest.raises(NonFiniteError):
        shared.seed(prompt(32, 91), 0, ContentKV(keys, values))
    assert shared.cached_tokens(prompt(32, 91)) == 0


def test_windowed_models_prefill_natively() -> None:
    with running(tiny_loaded("mistral-window")) as engine:
        content = own_content(engine.model, prompt(64), 0, 64)
        assert not engine.can_seed
        assert engine.seed(prompt(64), 0, content) == 0
        assert ids(generate(engine, (prompt(90), GREEDY))[0]) == native(engine.model, prompt(90))


def test_sink_content_is_the_beginning_of_any_prompt(shared: Engine, model: LoadedModel) -> None:
    token_ids = prompt(60, 3)
    expected = own_content(model, token_ids, 0, 4)
    found = shared.sink_content(token_ids[:4])
    torch.testing.assert_close(found.keys, expected.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-5)
    assert shared.sink_content(token_ids[:4]) is found


def test_sink_contents_are_bounded() -> None:
    with running(sinks=2) as engine:
        first = engine.sink_content([5, 6])
        engine.sink_content([7, 8])
        assert engine.sink_content([5, 6]) is first  # now the younger one
        engine.sink_content([9, 10])
        assert engine.sink_content([5, 6]) is first
        assert len(engine._sinks) == 2


# ----------------------------------------------------------------------------------------------- ends


def test_end_tokens_are_the_models_own() -> None:
    """Qwen3#927: a list, none of it the tokenizer's; the answer ends there, and the token is not shown."""
    model = tiny_loaded()
    token_ids = prompt(40)
    expected = native(model, token_ids)
    model.model.generation_config.eos_token_id = [319, expected[5]]
    stop_at = expected.index(expected[5]) + 1
    with running(model) as engine:
        stopped, ignored = generate(engine, (token_ids, replace(GREEDY, ignore_eos=False)), (token_ids, GREEDY))
        assert ids(stopped) == expected[:stop_at]
        assert [event.finish_reason for event in stopped[-2:]] == [None, "stop"]
        assert stopped[-1].text == ""
        assert (ids(ignored), ignored[-1].finish_reason) == (expected, "length")


def test_a_stop_string_ends_the_request(shared: Engine) -> None:
    """Cut before the string, and the pages of the request come back although it had tokens to go."""
    long = replace(GREEDY, max_tokens=60)
    (whole,) = generate(shared, (prompt(45), long))
    stop = text(whole)[10:13]
    (events,) = generate(shared, (prompt(45), replace(long, stop=(stop, "never"))))
    assert text(events) == text(whole)[: text(whole).index(stop)]
    assert events[-1].finish_reason == "stop"
    assert len(events) < len(whole)
    assert used_pages(shared) == 0


def test_the_text_held_for_a_stop_string_is_flushed(shared: Engine) -> None:
    """llama.cpp#9867: the tokens end on what might have become a stop string."""
    (plain,) = generate(shared, (prompt(46), GREEDY))
    stop = plain[-1].text + text(plain)[-1:] + " and more"
    (events,) = generate(shared, (prompt(46), replace(GREEDY, stop=(text(plain)[-2:] + "never", stop))))
    assert text(events) == text(plain)
    assert events[-1].finish_reason == "length"


def test_without_max_tokens_the_context_is_filled(shared: Engine) -> None:
    (events,) = generate(shared, (prompt(480), replace(GREEDY, max_tokens=None)))
    assert len(events) == 32
    assert events[-1].finish_reason == "length"


# ----------------------------------------------------------------------------------------------- refusals


def test_the_context_is_checked_before_anything_runs(shared: Engine) -> None:
    """sglang#30233: at the limit all is well, one token beyond it is refused; so is a huge max_tokens."""
    one = replace(GREEDY, max_tokens=1)
    assert shared.context_length == 512
    assert len(generate(shared, (prompt(510), one))[0]) == len(generate(shared, (prompt(511), one))[0]) == 1
    for token_ids, params in (
        (prompt(512), one),
        (prompt(512), replace(one, max_tokens=None)),
        (prompt(10), replace(one, max_tokens=503)),
        (prompt(10), replace(one, max_tokens=10**8)),
    ):
        with pytest.raises(ContextLengthError, match="512"):
            generate(shared, (token_ids, params))
    with running(cache_tokens=4 * PAGE) as engine, pytest.raises(ContextLengthError, match="128"):
        generate(engine, (prompt(128), one))


@pytest.mark.parametrize("token_ids", [[], [-1], [3, 320], [3, 2**40]])
def test_prompts_that_would_break_the_batch_are_refused(
    shared: Engine, model: LoadedModel, token_ids: list[int]
) -> None:
    """vllm#7746: and the next request works."""
    with pytest.raises(PromptError):
        generate(shared, (token_ids, GREEDY))
    assert ids(generate(shared, (prompt(9), GREEDY))[0]) == native(model, prompt(9))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, -1)),
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        *(("top_p", value) for value in (0.0, 1.1)),
        *(("top_k", -1), ("logprobs", -1)),
        *(("stop", value) for value in (("",), "text")),
    ],
)
def test_bad_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


# ----------------------------------------------------------------------------------------------- aborts


async def first_events(engine: Engine, token_ids: list[int], count: int) -> None:
    """Read so many events, then leave."""
    async with aclosing(engine.stream(token_ids, replace(GREEDY, max_tokens=200))) as events:
        for _ in range(count):
            await anext(events)


def test_a_storm_of_aborts_leaves_nothing_and_touches_nobody() -> None:
    """vllm#46283, sglang#24578: 50 aborts, some before the first token, some while they wait."""
    survivors = [prompt(20 + 7 * seed, 2) for seed in range(6)]
    with running(cache_tokens=64 * PAGE, max_batch=8) as engine:

        async def storm() -> list[Any]:
            kept = [asyncio.create_task(collect(engine.stream(token_ids, GREEDY))) for token_ids in survivors[:3]]
            leaving = [first_events(engine, prompt(100 + seed, 3), seed % 4) for seed in range(25)]
            unread = [asyncio.create_task(first_events(engine, prompt(100 + seed, 4), 99)) for seed in range(25)]
            await asyncio.gather(*leaving)
            kept += [asyncio.create_task(collect(engine.stream(token_ids, GREEDY))) for token_ids in survivors[3:]]
            for task in unread:
                task.cancel()
            await asyncio.gather(*unread, return_exceptions=True)
            return await asyncio.gather(*kept)

        found = asyncio.run(asyncio.wait_for(storm(), 120))
        assert [ids(events) for events in found] == [native(engine.model, token_ids) for token_ids in survivors]
        assert used_pages(engine) == 0
        stats = engine.stats()
        assert (stats["running"], stats["waiting"], len(engine._inboxes)) == (0, 0, 0)
        assert not engine._batcher._outbox._receivers


def test_a_seed_survives_the_abort_of_its_request() -> None:
    token_ids = prompt(100)
    with running() as engine:
        engine.seed(token_ids[:96], 0, own_content(engine.model, token_ids, 0, 96))
        asyncio.run(first_events(engine, token_ids, 2))
        assert used_pages(engine) == 0
        (events,) = generate(engine, (token_ids, GREEDY))
        assert (ids(events), events[0].cached_tokens) == (native(engine.model, token_ids), 96)


def test_a_request_can_be_cancelled_by_its_id(shared: Engine) -> None:
    async def run() -> list[Any]:
        found = []
        async for event in shared.stream(prompt(30), replace(GREEDY, max_tokens=400), request_id="mine"):
            found.append(event)
            if len(found) == 3:
                shared.cancel("mine")
                shared.cancel("another")
        return found

    events = asyncio.run(asyncio.wait_for(run(), 60))
    assert events[-1].finish_reason == "cancelled"
    assert len(events) < 400
    assert used_pages(shared) == 0


def test_an_id_is_not_used_twice_at_once(shared: Engine) -> None:
    async def run() -> None:
        async with aclosing(shared.stream(prompt(30), GREEDY, request_id="twin")) as events:
            await anext(events)
            with pytest.raises(EngineError, match="twin"):
                await collect(shared.stream(prompt(31), GREEDY, request_id="twin"))
        assert len(await collect(shared.stream(prompt(30), GREEDY, request_id="twin"))) == 12

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_event_loop_that_closes_does_not_end_the_engine(shared: Engine, model: LoadedModel) -> None:
    """Its stream is abandoned without being closed; tokens for it find no loop to run in."""
    loop = asyncio.new_event_loop()
    events = shared.stream(prompt(30), replace(GREEDY, max_tokens=100))
    loop.run_until_complete(anext(events))
    loop.close()
    assert ids(generate(shared, (prompt(35), GREEDY))[0]) == native(model, prompt(35))


# ----------------------------------------------------------------------------------------------- failures and end


def test_the_death_of_the_thread_reaches_every_stream() -> None:
    """None may wait for ever: those that run, those that wait, and those that come later."""
    with running(max_batch=2) as engine:

        async def run() -> list[Any]:
            streams = [
                asyncio.create_task(collect(engine.stream(prompt(20, s), replace(GREEDY, max_tokens=400))))
                for s in range(6)
            ]
            await asyncio.to_thread(die, engine)
            return await asyncio.gather(*streams, return_exceptions=True)

        found = asyncio.run(asyncio.wait_for(run(), 60))
        assert [type(error) for error in found] == [EngineStoppedError] * 6
        assert all("made to fail" in str(error) for error in found)
        with pytest.raises(EngineStoppedError):
            generate(engine, (prompt(5), GREEDY))
        with pytest.raises(EngineStoppedError):
            engine.seed(prompt(32), 0, own_content(engine.model, prompt(32), 0, 32))


def die(engine: Engine) -> None:
    """End the generation thread by a forward that fails."""

    def fail(*_: Any) -> None:
        raise RuntimeError("made to fail")

    thread = engine._batcher._manager._generation_thread
    engine.model.model.register_forward_pre_hook(fail)
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_stop_ends_streams_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with running() as engine:

        async def run() -> None:
            async with aclosing(engine.stream(prompt(20), replace(GREEDY, max_tokens=400))) as events:
                await anext(events)
                await asyncio.to_thread(engine.stop)
                with pytest.raises(EngineStoppedError):
                    await collect(events)

        asyncio.run(asyncio.wait_for(run(), 60))
    assert not [thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio")]
    with pytest.raises(EngineStoppedError):
        generate(engine, (prompt(5), GREEDY))


def test_an_engine_that_was_not_started_says_so() -> None:
    with pytest.raises(EngineStoppedError, match="not started"):
        generate(Engine(tiny_loaded(), cache_tokens=1024), (prompt(5), GREEDY))


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    """Qwen3#826: without the check the answer is token 0 for ever.

    In the attention of the whole prompt zero times NaN is NaN, so the request's first page is broken too, and it
    is the first page of the healthy prompt that comes later.
    """
    model = tiny_loaded()
    good, other = prompt(40), prompt(40, 1)
    expected = {tuple(token_ids): native(model, token_ids) for token_ids in (good, other)}
    poison = min(set(range(3, 256)).difference(good, other, *expected.values()))
    with torch.no_grad():
        model.model.get_input_embeddings().weight[poison] = float("nan")
    with running(model) as engine:

        async def run() -> list[Any]:
            streams = (collect(engine.stream(token_ids, GREEDY)) for token_ids in ([*good, poison], other))
            return await asyncio.gather(*streams, return_exceptions=True)

        broken, fine = asyncio.run(asyncio.wait_for(run(), 60))
        assert isinstance(broken, NonFiniteError)
        assert ids(fine) == expected[tuple(other)]
        (later,) = generate(engine, (good, GREEDY))
        assert (ids(later), later[0].cached_tokens) == (expected[tuple(good)], 0)
        assert used_pages(engine) == 0
