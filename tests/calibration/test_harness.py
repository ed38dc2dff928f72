"""The harness, proved by what must be perfect, what must not, and plain generation."""

import pytest
import torch

from calibration.harness import Harness, Parcel
from calibration.methods import with_sinks
from scd_core.capture import ContentKV, StateChunk, capture_all
from scd_core.codec import SINK_TOKENS, identity_codec, zero_codec
from tests.tiny import tiny_ids

CODED = 64


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama


@pytest.fixture(scope="module")
def harness(model):
    return Harness(model, max_new=8)


@pytest.fixture(scope="module")
def ids():
    return tiny_ids(CODED + 23, seed=1)


def holding(content: ContentKV) -> Parcel:
    return Parcel(0, lambda _: content)


def decoded(codec, content: ContentKV, ids, model) -> Parcel:
    """The content through a codec; an encoder leaves the sinks out."""
    encoder, decoder = codec
    codes = encoder.encode(StateChunk(0, content))
    return Parcel(0, lambda sinks: with_sinks(decoder.decode(codes, ids, model), sinks))


def generated(model, ids, count) -> list[int]:
    """What transformers' own ``generate`` answers."""
    out = model.model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, attention_mask=torch.ones(1, len(ids))
    )
    return out[0, len(ids) :].tolist()


def test_the_oracle_is_plain_generation(model, harness, ids):
    reference = harness.oracle(ids)
    assert reference.answer == generated(model, ids, 8)
    assert reference.logits.shape == (len(reference.answer), model.signature.vocab_size)
    assert reference.logits.argmax(-1).tolist() == reference.answer
    assert reference.ttft_s > 0


def test_own_content_through_the_identity_codec_is_perfect(model, harness, ids):
    reference = harness.oracle(ids)
    own = capture_all(model, ids[:CODED]).content
    codec = identity_codec(model.layers, model.kv_dim)
    outcome = harness.answer(ids, CODED, decoded(codec, own, ids[:CODED], model), reference)
    assert outcome.answer == reference.answer
    assert max(outcome.kl) < 1e-5  # nats
    assert outcome.agreement == [1.0] * len(reference.answer)


def test_the_zero_codec_is_noticed(model, harness, ids):
    """A harness that prefills the whole prompt anyway, or ignores the parcel, would call zeros perfect."""
    reference = harness.oracle(ids)
    own = capture_all(model, ids[:CODED]).content
    codec = zero_codec(model.layers, model.kv_dim)
    outcome = harness.answer(ids, CODED, decoded(codec, own, ids[:CODED], model), reference)
    assert max(outcome.kl) > 1e-2  # nats


def test_an_answer_that_leaves_the_oracles_is_generated_from_there(model, harness, ids):
    """The answer is resumed where it leaves the oracle's; it must be what generation from scratch on the same
    cache gives. Perturbed caches of rising strength make the two part at different tokens."""
    reference = harness.oracle(ids)
    own = capture_all(model, ids[:CODED]).content
    parted = set()
    for step in range(1, 13):
        torch.manual_seed(step)
        noise = [0.06 * step * t.std() * torch.randn_like(t) for t in (own.keys, own.values)]
        content = ContentKV(own.keys + noise[0], own.values + noise[1])
        answer = harness.answer(ids, CODED, holding(content), reference).answer
        cache = model.cache_from(content.keys, content.values, torch.arange(CODED))
        pending, expected, position = ids[CODED:], [], CODED
        while len(expected) < 8 and not (expected and expected[-1] in harness.stop_ids):
            with torch.no_grad():
                out = model.model(
                    torch.tensor([pending]),
                    cache=cache,
                    position_ids=torch.arange(position, position + len(pending))[None],
                )
            position += len(pending)
            pending = [int(out.logits[0, -1].argmax())]
            expected += pending
        assert answer == expected
        pairs = enumerate(zip(answer, reference.answer, strict=False))
        parted.add(next((i for i, (a, b) in pairs if a != b), None))
    assert len(parted - {None}) >= 2, "the perturbations never parted the answers: the test shows nothing"


def test_generation_stops_at_the_specialists_own_end_token(model, ids):
    free = Harness(model, max_new=8)
    answer = free.oracle(ids).answer
    ending = Harness(model, max_new=8)
    ending.stop_ids = frozenset({answer[2]})
    stopped = ending.oracle(ids)
    first = answer.index(answer[2])
    assert stopped.answer == answer[: first + 1]
    own = capture_all(model, ids[:CODED]).content
    assert ending.answer(ids, CODED, holding(own), stopped).answer == stopped.answer


def test_a_parcel_is_given_the_specialists_own_sinks(model, harness, ids):
    """A codec that loses the first tokens altogether is whole again once the sinks are the specialist's own."""
    reference = harness.oracle(ids)
    own = capture_all(model, ids[:CODED]).content
    torn = ContentKV(own.keys.clone(), own.values.clone())
    torn.keys[:, :SINK_TOKENS] = 0
    torn.values[:, :SINK_TOKENS] = 0
    mended = harness.answer(ids, CODED, Parcel(0, lambda sinks: with_sinks(torn, sinks)), reference)
    assert max(mended.kl) < 1e-5  # nats
    assert max(harness.answer(ids, CODED, holding(torn), reference).kl) > 1e-4


def test_logits_behind_a_prefix_are_the_native_ones(model, harness, ids):
    native, _ = harness.logits_behind(ids, CODED, None)
    own = capture_all(model, ids[:CODED]).content
    handed, _ = harness.logits_behind(ids, CODED, holding(own))
    assert native.shape == (len(ids) - CODED, model.signature.vocab_size)
    torch.testing.assert_close(handed, native, atol=1e-4, rtol=1e-4)
