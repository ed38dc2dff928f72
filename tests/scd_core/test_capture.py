"""Capture: chunks, continuation, and what it leaves behind on the model."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scd_core.capture import ContentKV, StateChunk, capture, capture_all
from scd_core.huggingface import LoadedModel, plain_shell
from tests.tiny import tiny_ids, tiny_loaded

IDS = tiny_ids(45)


def assert_same(one: StateChunk, other: StateChunk, atol: float = 1e-4) -> None:
    assert one.start == other.start
    assert torch.allclose(one.content.keys, other.content.keys, atol=atol)
    assert torch.allclose(one.content.values, other.content.values, atol=atol)
    assert set(one.hidden) == set(other.hidden)
    for layer, hidden in one.hidden.items():
        assert torch.allclose(hidden, other.hidden[layer], atol=atol)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "gemma2", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_many_chunks_equal_one(variant: str, chunk: int) -> None:
    """Windows shorter, as long and longer than a chunk: a mask of the wrong length shows here."""
    model = tiny_loaded(variant)
    whole = capture_all(model, IDS, chunk=len(IDS), hidden_layers=[0, 2])
    assert whole.content.keys.shape == (3, 45, model.kv_dim)
    assert whole.hidden[2].shape == (45, 64)
    assert_same(capture_all(model, IDS, chunk=chunk, hidden_layers=[0, 2]), whole)


@pytest.mark.parametrize("variant", ["llama-yarn", "mistral-window", "gemma3"])
def test_capture_continues_after_cached_content(variant: str) -> None:
    """A producer prefills only what is new. Content lacks the rotation: it must be put back where it was."""
    model = tiny_loaded(variant)
    whole = capture_all(model, IDS, hidden_layers=[1])
    rest = capture_all(model, IDS, chunk=6, hidden_layers=[1], past=whole.content.slice(0, 32))
    assert_same(rest, StateChunk(32, whole.content.slice(32, 45), {1: whole.hidden[1][32:]}))


def test_past_matters(tiny_llama: LoadedModel) -> None:
    whole = capture_all(tiny_llama, IDS)
    other = capture_all(tiny_llama, tiny_ids(45, seed=9)).content.slice(0, 32)
    rest = capture_all(tiny_llama, IDS, past=other)
    assert not torch.allclose(rest.content.keys[1:], whole.content.slice(32, 45).keys[1:], atol=0.1)


def test_chunks_come_in_order_and_nothing_when_all_is_past(tiny_llama: LoadedModel) -> None:
    chunks = list(capture(tiny_llama, IDS, chunk=20))
    assert [(c.start, c.content.tokens) for c in chunks] == [(0, 20), (20, 20), (40, 5)]
    content = ContentKV.concat([c.content for c in chunks])
    assert list(capture(tiny_llama, IDS, past=content)) == []
    with pytest.raises(ValueError, match="no tokens to capture"):
        capture_all(tiny_llama, [])


def test_only_one_chunk_is_alive(tiny_llama: LoadedModel) -> None:
    """A prefill of any length needs a chunk's activations: nothing may hold on to what was handed out."""
    stream = capture(tiny_llama, IDS, chunk=16, hidden_layers=[1])
    chunk = next(stream)
    kept = [weakref.ref(t) for t in (chunk.content.keys, chunk.content.values, chunk.hidden[1])]
    del chunk
    assert [ref() for ref in kept] == [None] * 3


def test_hooks_go_even_when_the_forward_fails() -> None:
    model = tiny_loaded("llama")
    with pytest.raises(IndexError):
        capture_all(model, [1, 2, 10_000])
    for shell in (model.model, model.shell):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in shell.modules())
    assert capture_all(model, [1, 2, 3]).content.tokens == 3, "the lock was not released"


def test_concurrent_captures_equal_their_solo_runs() -> None:
    """Hooks of one thread must not record another thread's tokens."""
    model = tiny_loaded("llama")
    prompts = [tiny_ids(20 + i, seed=i) for i in range(8)]
    solo = [capture_all(model, ids, chunk=4, hidden_layers=[1]) for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ids: capture_all(model, ids, chunk=4, hidden_layers=[1]), prompts))
    for one, other in zip(solo, together, strict=True):
        assert_same(one, other)


def test_capture_works_while_the_model_has_paged_attention() -> None:
    """transformers#48735: continuous batching sets it on the live model, and ordinary forwards go wrong."""
    model = tiny_loaded("llama")
    expected = capture_all(model, IDS)
    model.model.set_attn_implementation("paged|eager")
    assert_same(capture_all(tiny_loaded("llama"), IDS), expected)
    assert_same(capture_all(model, IDS), expected)
    fresh = tiny_loaded("llama")
    fresh.model.set_attn_implementation("paged|eager")
    assert_same(capture_all(fresh, IDS), expected)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "gemma3"])
def test_plain_shell_shares_weights_and_nothing_else(variant: str) -> None:
    model = tiny_loaded(variant).model
    ids = torch.tensor([IDS])
    expected = model(input_ids=ids).logits
    shell = plain_shell(model)
    ours, theirs = dict(shell.named_parameters()), dict(model.named_parameters())
    assert {n: p.data_ptr() for n, p in ours.items()} == {n: p.data_ptr() for n, p in theirs.items()}
    model.config._attn_implementation = "paged|eager"
    assert not torch.allclose(model(input_ids=ids).logits, expected, atol=0.1), "the trap is gone: simplify"
    assert shell.config is not model.config
    assert torch.allclose(shell(input_ids=ids).logits, expected, atol=1e-5)


def test_plain_shell_beside_a_live_manager() -> None:
    """The manager hangs on the model with threads and locks that cannot be copied."""
    model = tiny_loaded("llama").model
    expected = model(input_ids=torch.tensor([IDS])).logits
    object.__setattr__(model, "_cached_continuous_batching_manager", ThreadPoolExecutor(1))
    shell = plain_shell(model)
    assert not hasattr(shell, "_cached_continuous_batching_manager")
    assert torch.allclose(shell(input_ids=torch.tensor([IDS])).logits, expected, atol=1e-5)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 5)), ((3, 4), (3, 4))])
def test_content_refuses_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"must be \[L, T, C\]"):
        ContentKV(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
