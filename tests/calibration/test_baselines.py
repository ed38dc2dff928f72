"""The baselines: honest bytes, exact where they must be, and RoPE handled as their names say."""

import pytest
import torch

from calibration.baselines import FourBit, Int4, Raw
from calibration.droidspeak import DroidSpeak, LayerRun, capture_prefix, profile_critical_layers
from calibration.harness import Harness
from scd_core.capture import capture_all
from tests.tiny import VARIANTS, tiny_ids, tiny_loaded

CODED = 64


def opened(method, prefix):
    parcel = method.send(prefix)
    return parcel.open(None), parcel.nbytes


@pytest.fixture(scope="module")
def producer(tiny_llama):
    return tiny_llama


@pytest.fixture(scope="module")
def specialist():
    """Other weights, the producer's RoPE."""
    return tiny_loaded("llama", seed=1)


@pytest.fixture(scope="module")
def other_rope():
    return tiny_loaded("llama", seed=1, rope_parameters={"rope_type": "default", "rope_theta": 500.0})


@pytest.fixture(scope="module")
def ids():
    return tiny_ids(CODED + 20, seed=2)


def test_four_bits_lose_at_most_half_a_level_of_their_group():
    torch.manual_seed(0)
    x = torch.randn(3, 64, 96) * torch.logspace(-2, 2, 96)
    for dim in (1, 2):
        back = FourBit.of(x, dim).dequantise()
        grouped = x.unflatten(dim, (-1, 32))
        span = (grouped.amax(dim + 1, keepdim=True) - grouped.amin(dim + 1, keepdim=True)).expand_as(grouped)
        error = (back - x).abs().unflatten(dim, (-1, 32))
        # half a level, and float16's rounding of scale and minimum (2^-11 of the largest magnitude, twice)
        bound = span / 30 + 2**-10 * grouped.abs().amax(dim + 1, keepdim=True) + 1e-6
        assert bool((error <= bound).all())


def test_keys_are_grouped_per_channel_and_values_per_token():
    """A channel with outliers (as keys have) is held by groups along tokens, and spoils groups along channels."""
    torch.manual_seed(0)
    x = torch.randn(1, 64, 64)
    x[:, :, 3] += 100
    others = [c for c in range(64) if c != 3]

    def error(dim: int) -> float:
        return (FourBit.of(x, dim).dequantise() - x)[..., others].abs().max().item()

    assert error(1) < 0.3
    assert error(2) > 2


def test_four_bits_cost_five_with_their_scales():
    """4 bits, and 32 bits of scale and minimum for each 32 values: 5 bits per value."""
    x = torch.randn(2, 64, 96)
    assert FourBit.of(x, 1).nbytes == FourBit.of(x, 2).nbytes == x.numel() * 5 // 8


def test_four_bits_of_sizes_that_are_no_multiple_and_of_constants():
    torch.manual_seed(0)
    for shape in ((1, 64, 24), (1, 33, 5), (3, 1, 1)):
        x = torch.full(shape, 0.5)
        for dim in (1, 2):
            torch.testing.assert_close(FourBit.of(x, dim).dequantise(), x)


def test_raw_bytes_are_bfloat16(producer, other_rope, ids):
    prefix = capture_prefix(producer, ids[:CODED])
    _, nbytes = opened(Raw(producer, other_rope, rerotate=True), prefix)
    assert nbytes == 2 * producer.layers * producer.kv_dim * 2 * CODED


def test_raw_hands_over_the_producers_rotated_keys(producer, other_rope, ids):
    """In the specialist's cache raw keys stand as they stood in the producer's; re-rotated ones as content."""
    prefix = capture_prefix(producer, ids[:CODED])
    positions = torch.arange(CODED)
    theirs = producer.rotate(prefix.state.content.keys, positions)
    raw, _ = opened(Raw(producer, other_rope, rerotate=False), prefix)
    scale = theirs.abs().max().item()
    torch.testing.assert_close(other_rope.rotate(raw.keys, positions), theirs, atol=2**-8 * scale, rtol=0)
    rerotated, _ = opened(Raw(producer, other_rope, rerotate=True), prefix)
    torch.testing.assert_close(rerotated.keys, prefix.state.content.keys, atol=2**-8 * scale, rtol=0)
    assert (raw.keys - rerotated.keys).abs().max() > 0.1 * scale


def test_with_equal_rope_both_rows_are_equal(producer, specialist, ids):
    prefix = capture_prefix(producer, ids[:CODED])
    for method in (Raw, Int4):
        plain, size = opened(method(producer, specialist, rerotate=False), prefix)
        courteous, same_size = opened(method(producer, specialist, rerotate=True), prefix)
        assert size == same_size
        torch.testing.assert_close(plain.keys, courteous.keys)
        torch.testing.assert_close(plain.values, courteous.values)


def test_int4_is_near_raw_at_under_a_third_of_its_bytes(producer, specialist, ids):
    prefix = capture_prefix(producer, ids[:CODED])
    raw, raw_bytes = opened(Raw(producer, specialist, rerotate=True), prefix)
    four, four_bytes = opened(Int4(producer, specialist, rerotate=True), prefix)
    assert four_bytes / raw_bytes == pytest.approx(5 / 16)
    for a, b in ((raw.keys, four.keys), (raw.values, four.values)):
        assert 0 < (a - b).abs().mean() < 0.15 * a.std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_of_layers_on_its_own_input_is_exact(variant):
    """For every family: fed its own residual stream, the run must give the model's own content. Guards against a
    wrong layer type (window, RoPE table), a scaled embedding and a wrong place of the tap."""
    model, ids = tiny_loaded(variant), tiny_ids(40, seed=3)
    layers = model.layers
    own = capture_all(model, ids).content
    for first, last in ((0, 1), (1, layers), (layers - 1, layers)):
        prefix = capture_prefix(model, ids, residual_layers=[first])
        torch.testing.assert_close(prefix.state.content.keys, own.keys)
        residual = prefix.residuals[first] if first else None
        run = LayerRun(model, first, last).content(residual, ids)
        torch.testing.assert_close(run.keys, own.keys[first:last], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(run.values, own.values[first:last], atol=1e-5, rtol=1e-4)


def test_a_run_of_layers_leaves_the_model_alone(specialist, ids):
    before = capture_all(specialist, ids).content
    layers = len(specialist.model.base_model.layers)
    run = LayerRun(specialist, 1, 2)
    run.content(torch.randn(len(ids), specialist.hidden_size), ids)
    assert len(specialist.model.base_model.layers) == layers == specialist.model.config.num_hidden_layers
    assert torch.equal(capture_all(specialist, ids).content.keys, before.keys)


def test_droidspeak_between_equal_models_is_the_model(producer, ids):
    """Up to bfloat16 on the wire. Its bytes: all other layers' keys and values, and one hidden state."""
    method = DroidSpeak(producer, producer, 1, 2)
    prefix = capture_prefix(producer, ids[:CODED], residual_layers=method.residual_layers)
    content, nbytes = opened(method, prefix)
    own = prefix.state.content
    for a, b in ((content.keys, own.keys), (content.values, own.values)):
        torch.testing.assert_close(a, b, atol=2**-6 * b.abs().max().item(), rtol=0)
    layers, width = producer.layers, producer.kv_dim
    assert nbytes == CODED * (2 * (layers - 1) * width + producer.hidden_size) * 2


def test_droidspeak_recomputes_with_the_specialists_weights(producer, specialist, ids):
    method = DroidSpeak(producer, specialist, 0, 2)
    assert method.residual_layers == []
    content, nbytes = opened(method, capture_prefix(producer, ids[:CODED]))
    own = capture_all(specialist, ids[:CODED]).content
    torch.testing.assert_close(content.keys[:2], own.keys[:2], atol=1e-4, rtol=1e-4)
    assert (content.keys[2:] - own.keys[2:]).abs().max() > 1e-2
    assert nbytes == CODED * 2 * (producer.layers - 2) * producer.kv_dim * 2


def test_the_profile_finds_the_layer_that_differs(producer, ids):
    """The specialist differs in its last layer's values only, so that layer's own restore it. Guards against an
    argmax, and against a run that is off by one."""
    changed = tiny_loaded("llama")
    last = changed.layers - 1
    with torch.no_grad():
        changed.model.base_model.layers[last].self_attn.v_proj.weight.mul_(-1)
    assert profile_critical_layers(producer, Harness(changed, 4), [(ids, CODED)], share=0.01) == (last, last + 1)
