"""Packing is lossless for any symbols, and refuses any payload that is not one."""

import contextlib
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scd_core.errors import ArtefactFormatError, CodeFormatError, NonFiniteError
from scd_core.packing import Packer, fit_packing

COLUMNS = 300


def symbols_like(tokens: int, seed: int = 0) -> torch.Tensor:
    """Columns from almost constant to wide, as a transform with one step for all of them makes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(math.log10(0.1), 1, COLUMNS)[torch.randperm(COLUMNS, generator=torch.Generator())]
    drawn = torch.randn(tokens, COLUMNS, generator=generator) * spread.sort().values.roll(COLUMNS // 3)
    return drawn.round().clamp(-127, 127).to(torch.int8)


@pytest.fixture(scope="module")
def tables():
    return fit_packing(symbols_like(2048))


@pytest.fixture(scope="module")
def packer(tables):
    return Packer(COLUMNS, "int8", tables)


def entropy(symbols: torch.Tensor) -> float:
    """Mean over the columns of the empirical entropy, bits per symbol."""
    total = 0.0
    for column in symbols.T.numpy():
        p = np.unique(column, return_counts=True)[1] / len(column)
        total -= float((p * np.log2(p)).sum())
    return total / symbols.shape[1]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cells=st.binary(max_size=600), columns=st.integers(1, 40))
def test_any_symbols_come_back_without_tables(cells, columns):
    tokens = len(cells) // columns
    codes = torch.tensor(list(cells[: tokens * columns]), dtype=torch.uint8).view(torch.int8).view(tokens, columns)
    packer = Packer(columns)
    assert torch.equal(packer.unpack(packer.pack(codes), tokens), codes)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), tokens=st.integers(0, 40))
def test_any_symbols_come_back_whatever_was_fitted(packer, data, tokens):
    # outliers the fit never saw, the asymmetric -128 among them, must take the escape and nothing else
    codes = symbols_like(tokens, seed=1)
    if tokens:
        cells = data.draw(
            st.lists(st.tuples(st.integers(0, tokens - 1), st.integers(0, COLUMNS - 1), st.integers(-128, 127)))
        )
        for token, column, value in cells:
            codes[token, column] = value
    assert torch.equal(packer.unpack(packer.pack(codes), tokens), codes)


@pytest.mark.parametrize("value", [-128, -127, -1, 0, 1, 127])
def test_a_page_of_one_value_comes_back(packer, value):
    codes = torch.full((32, COLUMNS), value, dtype=torch.int8)
    assert torch.equal(packer.unpack(packer.pack(codes), 32), codes)


def test_bytes_are_near_the_entropy(tables):
    """Guards the tables, on symbols they were not fitted to.

    Measured 1.15 of the entropy (a page of 300 columns is small, one of 10,000 comes to 1.04); 1.28 without the
    dictionaries, 1.36 without joining, 2.0 with the classes shuffled.
    """
    codes = symbols_like(2048, seed=7)
    packer = Packer(COLUMNS, "int8", tables)
    bits = 8 * sum(len(packer.pack(page)) for page in codes.split(32)) / codes.numel()
    assert entropy(codes) * 0.99 < bits < entropy(codes) * 1.2


@pytest.mark.parametrize("threads", [1, 3])
def test_many_pages_equal_one_by_one(tables, threads):
    packer = Packer(COLUMNS, "int8", tables, threads=threads)
    pages = symbols_like(32 * 5 + 7, seed=3).split(32)
    payloads = [packer.pack(page) for page in pages]
    together = packer.unpack_pages(payloads, [len(page) for page in pages])
    assert torch.equal(together, torch.cat(pages))


def test_threads_share_a_packer(packer):
    # a zstd context used by two threads at once corrupts both: each thread must have its own
    failures = []

    def work(seed: int) -> None:
        pages = symbols_like(320, seed).split(32)
        failures.extend(seed for page in pages if not torch.equal(packer.unpack(packer.pack(page), 32), page))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), bit=st.integers(0, 7), junk=st.binary(max_size=64))
def test_a_broken_payload_is_a_named_error_or_some_symbols(packer, cut, flip, bit, junk):
    """The wire format's digest finds changes; unpacking must survive whatever passes it, with nothing unnamed."""
    good = packer.pack(symbols_like(32, seed=2))
    flipped = bytearray(good)
    flipped[flip % len(good)] ^= 1 << bit
    for payload in (good[: cut % len(good)], bytes(flipped), good + junk, junk):
        with contextlib.suppress(CodeFormatError):
            assert packer.unpack(payload, 32).shape == (32, COLUMNS)


def test_truncated_extended_and_mistaken_payloads_are_refused(packer):
    codes = symbols_like(32, seed=2)
    codes[3, :50] = 99  # escapes, so that raw symbols end the payload
    good = packer.pack(codes)
    for payload in (good[:-1], good + b"\0", good[:10], b""):
        with pytest.raises(CodeFormatError):
            packer.unpack(payload, 32)
    with pytest.raises(CodeFormatError):
        packer.unpack(good, 31)


def test_a_frame_cannot_claim_gigabytes():
    """A frame that declares 1 TiB must be refused by its header, before anything is allocated."""
    # magicless zstd frame: descriptor with an 8 byte content size, single segment; then one empty last block
    frame = bytes([0b11100000]) + (1 << 40).to_bytes(8, "little") + bytes([1, 0, 0])
    with pytest.raises(CodeFormatError, match=str(1 << 40)):
        Packer(10).unpack(len(frame).to_bytes(4, "little") + frame, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unquantised_codes_go_as_they_are(dtype):
    packer = Packer(5, dtype)
    codes = torch.randn(7, 5).to(packer.dtype)
    data = packer.pack(codes)
    assert len(data) == codes.numel() * codes.itemsize
    assert torch.equal(packer.unpack(data, 7), codes)
    assert torch.equal(packer.unpack_pages([data, data], [7, 7]), torch.cat([codes, codes]))
    assert packer.unpack(b"", 0).shape == (0, 5)
    with pytest.raises(CodeFormatError):
        packer.unpack(data[:-1], 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_codes_are_refused_on_both_sides(bad):
    packer = Packer(2, "float32")
    codes = torch.tensor([[1.0, bad]])
    with pytest.raises(NonFiniteError):
        packer.pack(codes)
    with pytest.raises(NonFiniteError):
        packer.unpack(codes.numpy().tobytes(), 1)


@pytest.mark.parametrize(
    "codes", [torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.int8), torch.zeros(4).to(torch.int8)]
)
def test_other_codes_are_not_packed(codes):
    with pytest.raises(CodeFormatError):
        Packer(4).pack(codes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", torch.zeros(COLUMNS - 1, dtype=torch.uint8)),
        ("classes", torch.full((COLUMNS,), 200, dtype=torch.uint8)),
        ("classes", torch.zeros(COLUMNS)),
        ("joins", torch.tensor([[100, 5]], dtype=torch.uint8)),
        ("joins", torch.tensor([[0, 0]], dtype=torch.uint8)),
        ("dictionaries", torch.zeros(0, 256, dtype=torch.uint8)),
        ("dictionaries", torch.full((1, 256), 7, dtype=torch.uint8)),
        ("dictionaries", None),
    ],
)
def test_tables_that_do_not_fit_are_refused_on_construction(name, value):
    tables = {
        "classes": torch.zeros(COLUMNS, dtype=torch.uint8),
        "joins": torch.tensor([[127, 1]], dtype=torch.uint8),
        "dictionaries": torch.zeros(1, 256, dtype=torch.uint8),
    }
    Packer(COLUMNS, "int8", tables)
    tables[name] = value
    if value is None:
        del tables[name]
    with pytest.raises(ArtefactFormatError):
        Packer(COLUMNS, "int8", tables)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 5), (5, 0), (0, 0), (1, 1), (3, 200)])
def test_fitting_to_next_to_nothing_still_packs_anything(tokens, columns):
    tables = fit_packing(torch.zeros(tokens, columns, dtype=torch.int8))
    codes = torch.randint(-128, 128, (32, columns), dtype=torch.int8)
    packer = Packer(columns, "int8", tables)
    assert torch.equal(packer.unpack(packer.pack(codes), 32), codes)
