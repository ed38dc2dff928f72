"""Codes handed over as real pages: counted as sent, refused when spoilt."""

import pytest
import torch

from calibration.droidspeak import capture_prefix
from calibration.harness import PrefixState
from calibration.methods import Coded, with_sinks
from scd_core.capture import ContentKV, capture_all
from scd_core.codec import SINK_TOKENS, identity_codec
from scd_core.errors import NonFiniteError
from scd_core.wire import OVERHEAD
from tests.tiny import tiny_ids

CODED = 64


@pytest.fixture(scope="module")
def prefix(tiny_llama):
    return capture_prefix(tiny_llama, tiny_ids(CODED, seed=4))


def test_pages_carry_the_content_and_the_sinks_are_the_specialists_own(tiny_llama, prefix):
    method = Coded("scd", *identity_codec(tiny_llama.layers, tiny_llama.kv_dim), tiny_llama)
    sinks = capture_all(tiny_llama, prefix.token_ids[:SINK_TOKENS]).content
    marked = ContentKV(sinks.keys + 1, sinks.values - 1)
    parcel = method.send(prefix)
    content, own = parcel.open(marked), prefix.state.content
    assert torch.equal(content.keys[:, SINK_TOKENS:], own.keys[:, SINK_TOKENS:])
    assert torch.equal(content.values[:, SINK_TOKENS:], own.values[:, SINK_TOKENS:])
    assert torch.equal(content.keys[:, :SINK_TOKENS], marked.keys)
    assert torch.equal(content.values[:, :SINK_TOKENS], marked.values)


def test_bytes_count_every_page_with_its_header(tiny_llama, prefix):
    """float32 codes go as they are: what is sent is their size and one header and digest for each page."""
    method = Coded("scd", *identity_codec(tiny_llama.layers, tiny_llama.kv_dim), tiny_llama)
    scalars = 2 * tiny_llama.layers * tiny_llama.kv_dim * CODED
    assert method.send(prefix).nbytes == 4 * scalars + 2 * OVERHEAD


def test_state_that_is_not_finite_is_refused(tiny_llama, prefix):
    method = Coded("scd", *identity_codec(tiny_llama.layers, tiny_llama.kv_dim), tiny_llama)
    keys = prefix.state.content.keys.clone()
    keys[1, 40, 3] = torch.inf
    state = type(prefix.state)(0, ContentKV(keys, prefix.state.content.values))
    with pytest.raises(NonFiniteError):
        method.send(PrefixState(prefix.token_ids, state, {}))


def test_sinks_fill_a_prefix_shorter_than_they_are():
    short = ContentKV(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    sinks = ContentKV(torch.ones(1, SINK_TOKENS, 3), torch.ones(1, SINK_TOKENS, 3))
    assert torch.equal(with_sinks(short, sinks).keys, torch.ones(1, 2, 3))
