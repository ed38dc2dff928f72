"""Every family against its own cache: what is captured, and the way back, is what the model itself computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config
from transformers.cache_utils import DynamicCache

from scd_core.capture import StateChunk, capture_all
from scd_core.errors import UnsupportedModelError
from scd_core.huggingface import LoadedModel, check_config
from scd_core.signature import serving_refusal
from tests.tiny import VARIANTS, WINDOW, tiny_config, tiny_ids, tiny_loaded

TOKENS, HELD_BACK = 50, 9
IDS = tiny_ids(TOKENS)
EXACT = 1e-4
"""Float32 noise over three layers is about 1e-5; a term left out is above 1e-2."""


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_loaded(request.param)


@pytest.fixture(scope="module")
def state(loaded: LoadedModel) -> StateChunk:
    return capture_all(loaded, IDS, chunk=16, hidden_layers=range(loaded.layers))


def native(loaded: LoadedModel, cache: Any = None, ids: list[int] = IDS) -> Any:
    with torch.no_grad():
        return loaded.model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)


def test_the_capture_is_the_models_own_cache(loaded: LoadedModel, state: StateChunk) -> None:
    """Against a cache that forgets nothing. Guards fused splits, biases, qk-norm and head order."""
    full = DynamicCache()
    native(loaded, full)
    rotated = loaded.rotate(state.content.keys, torch.arange(TOKENS))
    for layer in range(loaded.layers):
        keys, values = full.layers[layer].keys[0], full.layers[layer].values[0]
        assert torch.allclose(rotated[layer], keys.transpose(0, 1).flatten(-2), atol=EXACT)
        assert torch.allclose(state.content.values[layer], values.transpose(0, 1).flatten(-2), atol=EXACT)
    back = loaded.content_of(full, 0, TOKENS)
    assert torch.allclose(back.keys, state.content.keys, atol=EXACT)


def test_own_projections_give_own_keys_and_values(loaded: LoadedModel, state: StateChunk) -> None:
    """The way of PATCH: H_in through the model's own weights."""
    for layer, hidden in state.hidden.items():
        keys, values = loaded.project(layer, hidden)
        assert torch.allclose(keys, state.content.keys[layer], atol=EXACT)
        assert torch.allclose(values, state.content.values[layer], atol=EXACT)


def test_layer_0_follows_from_the_ids_alone(loaded: LoadedModel, state: StateChunk) -> None:
    """Guards Gemma's scaled embedding and the norm."""
    assert torch.allclose(loaded.embedding_state(IDS), state.hidden[0], atol=1e-6)


def test_restored_content_gives_native_logits(loaded: LoadedModel, state: StateChunk) -> None:
    """The prefix is several windows long: a window lost, or a mask off by one, moves the logits."""
    expected = native(loaded).logits[0, -HELD_BACK:]
    prefix = state.content.slice(0, TOKENS - HELD_BACK)
    cache = loaded.cache_from(prefix.keys, prefix.values, torch.arange(prefix.tokens))
    assert torch.allclose(native(loaded, cache, IDS[-HELD_BACK:]).logits[0], expected, atol=EXACT)

    shifted = loaded.cache_from(prefix.keys, prefix.values, torch.arange(prefix.tokens) + 3)
    wrong = native(loaded, shifted, IDS[-HELD_BACK:]).logits[0]
    assert (wrong - expected).abs().max() > 1e-2, "positions do not matter to this model: the test shows nothing"


def test_derotation_is_the_exact_inverse(loaded: LoadedModel) -> None:
    """Far positions, and YaRN's factor inside the tables (0.88 squared would be seen at once)."""
    keys = torch.randn(loaded.layers, 7, loaded.kv_dim)
    positions = torch.tensor([0, 1, 2, 100, 300, 510, 511])
    assert torch.allclose(loaded.derotate(loaded.rotate(keys, positions), positions), keys, atol=1e-5)
    assert not torch.allclose(loaded.rotate(keys, positions), keys, atol=0.1)


def test_single_layers_are_turned_by_their_own_tables(loaded: LoadedModel) -> None:
    """Gemma 3's layers differ in theta: a row must be turned as the layer it is."""
    keys, positions = torch.randn(loaded.layers, 5, loaded.kv_dim), torch.arange(40, 45)
    whole = loaded.rotate(keys, positions)
    for layer in range(loaded.layers):
        assert torch.allclose(loaded.rotate(keys[layer : layer + 1], positions, layers=[layer])[0], whole[layer])


def test_content_of_refuses_what_a_window_has_dropped(loaded: LoadedModel) -> None:
    cache = native(loaded).cache
    if loaded.signature.window is None:
        assert loaded.content_of(cache, 0, 5).tokens == 5
        return
    with pytest.raises(
        UnsupportedModelError, match=rf"holds tokens {TOKENS - WINDOW + 1}\.\.{TOKENS}, not 0\.\.5"
    ):
        loaded.content_of(cache, 0, 5)


def test_windows_and_softcaps_are_not_served(loaded: LoadedModel) -> None:
    """The paged cache would never find seeded pages, or attend without the cap, and nobody would notice."""
    refusal = serving_refusal(loaded.signature)
    if loaded.signature.family == "gemma2":
        assert refusal is not None
        assert "capped at 50.0" in refusal
    elif loaded.signature.window is not None:
        assert refusal is not None
        assert f"slide over {WINDOW} tokens" in refusal
    else:
        assert refusal is None


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: GPT2Config(), "family 'gpt2' is not supported; supported are llama, "),
        (lambda: tiny_config("llama", rope_parameters=DYNAMIC), "RoPE scaling 'dynamic'"),
        (lambda: tiny_config("phi3", rope_parameters=LONGROPE), "RoPE scaling 'longrope'"),
        (lambda: tiny_config("llama", sliding_window=8), "a sliding window is not supported"),
        (lambda: tiny_config("gemma3", use_bidirectional_attention=True), "bidirectional"),
        (lambda: tiny_config("llama", quantization_config={"quant_method": "gptq"}), "quantised"),
        (
            lambda: tiny_config("llama", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (lambda: tiny_config("qwen2", layer_types=["chunked_attention"] * 3), "chunked_attention"),
    ],
    ids=["family", "dynamic", "longrope", "window", "bidirectional", "quantised", "partial", "chunked"],
)
def test_what_cannot_be_exact_is_refused_by_name(config: Any, reason: str) -> None:
    """Length-dependent RoPE above all: the keys of one prefix would differ between prompts."""
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config())


def test_a_missing_rope_theta_is_never_defaulted() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "default"}
    with pytest.raises(UnsupportedModelError, match="no rope_theta"):
        check_config(config)


YARN = {"rope_type": "yarn", "rope_theta": 2e5, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_theta": 1e6}, YARN, LLAMA3], ids=["theta", "yarn", "llama3"])
def test_content_crosses_between_ropes(rope: dict[str, Any]) -> None:
    """Equal weights in one layer, so that content is equal and RoPE alone differs between the two models.

    Derotated with the producer's tables and rotated with the consumer's it gives the consumer's native logits;
    the producer's keys as they are do not (the paper's "raw KV" collapses so).
    """
    producer = tiny_loaded("llama", num_hidden_layers=1)
    consumer = tiny_loaded("llama", num_hidden_layers=1, rope_parameters=rope)
    positions, split = torch.arange(TOKENS - HELD_BACK), TOKENS - HELD_BACK
    content = producer.content_of(native(producer).cache, 0, split)
    expected = native(consumer).logits[0, -HELD_BACK:]

    cache = consumer.cache_from(content.keys, content.values, positions)
    assert torch.allclose(native(consumer, cache, IDS[split:]).logits[0], expected, atol=EXACT)

    raw = consumer.derotate(producer.rotate(content.keys, positions), positions)
    wrong = native(consumer, consumer.cache_from(raw, content.values, positions), IDS[split:]).logits[0]
    assert (wrong - expected).abs().max() > 1e-2
