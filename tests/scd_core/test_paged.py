"""Contracts with transformers' continuous batching: what page_store.py and paged.py rely on inside it."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import torch

from scd_core import attention
from scd_core.errors import EngineStoppedError, NonFiniteError
from scd_core.paged import PagedBatcher, Step
from scd_core.sampling import Choice, SamplingParams
from tests.scd_core.serving import native, prompt
from tests.tiny import VARIANTS, WINDOW, tiny_loaded

PAGE = 32


class Host:
    """A started batcher and its thread's end."""

    def __init__(self, cache_tokens: int = 1024, variant: str = "llama") -> None:
        self.model = tiny_loaded(variant)
        self.ended: queue.Queue[BaseException | None] = queue.Queue()
        self.batcher = PagedBatcher(
            self.model.model, page_size=PAGE, cache_tokens=cache_tokens, max_batch=8, on_death=self.ended.put
        )
        self.batcher.start()

    def run(self, token_ids: list[int], tokens: int = 12) -> tuple[list[int], Choice]:
        """Greedy tokens of one request."""
        steps: queue.Queue[Step] = queue.Queue()
        choice = Choice(SamplingParams(max_tokens=tokens))
        self.batcher.add(token_ids, max_new_tokens=tokens, stop_ids=(), choice=choice, deliver=steps.put)
        found = []
        while not found or not found[-1].finished:
            found.append(steps.get(timeout=30))
        return [step.token_id for step in found], choice

    def content(self, tokens: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values that no model would compute."""
        shape = (self.model.layers, tokens, self.model.kv_dim)
        return torch.full(shape, fill), torch.full(shape, -fill)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.batcher.stop()


def test_the_replaced_parts_are_the_ones_in_use(host: Host) -> None:
    """Guards against a release whose thread takes its parts before ``start``: ours would silently go unused."""
    tokens, choice = host.run(prompt(40))
    processor = host.batcher._manager.batch_processor
    assert host.model.model.config._attn_implementation == attention.NAME
    assert processor.inputs_and_outputs.attention_mask is None  # the dense mask over all requests
    assert len(choice.chosen) == len(tokens) == 12
    assert choice.prefilled == 40


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_over_the_cache_is_the_models_own(variant: str) -> None:
    """Windows, capped logits and grouped heads, with prompts far beyond the window: sglang#30050."""
    host = Host(variant=variant)
    try:
        for length in (5, WINDOW, WINDOW + 1, 90):
            assert host.run(prompt(length))[0] == native(host.model, prompt(length))
    finally:
        host.batcher.stop()


def test_a_model_that_is_served_can_be_called(host: Host) -> None:
    """transformers#48735: an ordinary forward under a live manager failed."""
    expected = native(host.model, prompt(50))
    assert host.run(prompt(50))[0] == expected == native(host.model, prompt(50), shell=False)


def test_stop_gives_the_model_its_attention_back() -> None:
    host = Host()
    host.batcher.stop()
    assert host.model.model.config._attn_implementation == "sdpa"
    assert host.ended.get(timeout=10) is None


def test_pages_are_matched_by_their_whole_prefix(host: Host) -> None:
    """A hash of the page alone would give another prefix's keys to this one."""
    first = prompt(96)
    host.run(first)
    pages = host.batcher.pages
    assert pages.matching(first) == 3
    assert pages.matching(first[:95]) == 2
    assert pages.matching([*first[:32], first[32] ^ 1, *first[33:]]) == 1
    assert pages.matching(first[32:]) == 0


def test_the_cache_holds_this_models_rotated_content(host: Host) -> None:
    """Layout, order of layers and rotation, against the content captured by an ordinary prefill."""
    from scd_core.capture import capture_all

    token_ids = prompt(70)
    host.run(token_ids)
    keys, values = host.batcher.pages.read(token_ids[:64])
    content = capture_all(host.model, token_ids).content.slice(0, 64)
    torch.testing.assert_close(keys, host.model.rotate(content.keys, torch.arange(64)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, content.values, atol=1e-4, rtol=1e-4)


def test_written_pages_are_read_by_the_next_request(host: Host) -> None:
    token_ids = prompt(80)
    expected, _ = host.run(token_ids)
    other = Host()
    try:
        assert other.batcher.pages.write(token_ids[:64], 0, *other.content(64, 0.0)) == 2
        tokens, choice = other.run(token_ids)
        assert choice.prefilled == 16
        assert tokens != expected  # a cache of zeros cannot give the model's own answer
    finally:
        other.batcher.stop()


def test_cached_pages_are_never_overwritten(host: Host) -> None:
    """The second write covers one page that is there and one that is not."""
    token_ids = prompt(64)
    pages = host.batcher.pages
    assert pages.write(token_ids[:32], 0, *host.content(32, 1.0)) == 1
    assert pages.write(token_ids, 0, *host.content(64, 2.0)) == 1
    keys, values = pages.read(token_ids)
    assert (keys[:, :32] == 1).all()
    assert (keys[:, 32:] == 2).all()
    assert (values[:, 32:] == -2).all()
    assert pages.write(token_ids, 0, *host.content(64, 3.0)) == 0
    assert pages.cached == 2


def test_a_page_without_its_predecessors_is_refused(host: Host) -> None:
    token_ids = prompt(64)
    assert host.batcher.pages.write(token_ids, 32, *host.content(32, 1.0)) == 0
    assert host.batcher.pages.write(token_ids[:32], 0, *host.content(32, 1.0)) == 1
    assert host.batcher.pages.write(token_ids, 32, *host.content(32, 2.0)) == 1
    assert host.batcher.pages.read(token_ids)[0][0, :, 0].tolist() == [1.0] * 32 + [2.0] * 32


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_written(host: Host, broken: float) -> None:
    """Qwen3#826: one value of one layer is enough."""
    keys, values = host.content(64, 1.0)
    values[2, 63, 5] = broken
    with pytest.raises(NonFiniteError):
        host.batcher.pages.write(prompt(64), 0, keys, values)
    assert (host.batcher.pages.matching(prompt(64)), host.batcher.pages.free) == (0, 32)


def test_a_write_that_breaks_leaves_nothing(host: Host) -> None:
    """The last layer's values are missing: by then all the others are in the cache, and none may be found."""
    keys, values = host.content(64, 1.0)
    with pytest.raises(IndexError):
        host.batcher.pages.write(prompt(64), 0, keys, values[:-1])
    assert (host.batcher.pages.matching(prompt(64)), host.batcher.pages.free) == (0, 32)
    assert host.run(prompt(70))[0] == native(host.model, prompt(70))


def test_the_oldest_pages_give_way() -> None:
    host = Host(cache_tokens=10 * PAGE)  # of 10 pages, 2 stay free
    try:
        pages = host.batcher.pages
        for seed in range(4):
            assert pages.write(prompt(64, seed), 0, *host.content(64, 1.0)) == 2
        assert [pages.matching(prompt(64, seed)) for seed in range(5)] == [2, 2, 2, 2, 0]
        assert pages.write(prompt(64, 4), 0, *host.content(64, 1.0)) == 2
        assert [pages.matching(prompt(64, seed)) for seed in range(5)] == [0, 2, 2, 2, 2]
        assert pages.write(prompt(512, 5), 0, *host.content(512, 1.0)) == 8  # as many as there is room for
        assert (pages.free, pages.cached) == (2, 8)
        assert host.run(prompt(200))[0] == native(host.model, prompt(200))
    finally:
        host.batcher.stop()


def test_nothing_is_written_over_running_requests() -> None:
    """The cache belongs to one long request, held between two steps: seeding must find no room."""
    host = Host(cache_tokens=8 * PAGE)
    try:
        steps: queue.Queue[Step] = queue.Queue()
        token_ids = prompt(220)
        choice = Choice(SamplingParams(max_tokens=30))
        host.batcher.add(token_ids, max_new_tokens=30, stop_ids=(), choice=choice, deliver=steps.put)
        tokens = [steps.get(timeout=30).token_id]
        assert host.batcher.pages.write(prompt(64, 1), 0, *host.content(64, 1.0)) == 0
        tokens += [steps.get(timeout=30).token_id for _ in range(29)]
        assert tokens == native(host.model, token_ids, 30)
    finally:
        host.batcher.stop()


def test_windowed_models_share_no_pages() -> None:
    host = Host(variant="mistral-window")
    try:
        assert not host.batcher.pages.shares
        assert host.batcher.pages.write(prompt(64), 0, *host.content(64, 1.0)) == 0
        assert host.batcher.pages.matching(prompt(64)) == 0
    finally:
        host.batcher.stop()


def test_the_end_of_the_thread_is_heard(host: Host) -> None:
    """A receiver that raises ends the thread, as a failing forward does."""

    def fail(step: Step) -> None:
        if step.error is None:
            raise RuntimeError("the receiver failed")

    choice = Choice(SamplingParams())
    host.batcher.add(prompt(5), max_new_tokens=5, stop_ids=(), choice=choice, deliver=fail)
    assert "the receiver failed" in str(host.ended.get(timeout=30))
    with pytest.raises(EngineStoppedError):
        host.batcher.add(prompt(5), max_new_tokens=5, stop_ids=(), choice=choice, deliver=fail)
    with pytest.raises(EngineStoppedError):
        host.batcher.pages.write(prompt(32), 0, *host.content(32, 1.0))
