"""The wire format: a page is read exactly as written, or refused by name."""

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scd_core import wire
from scd_core.errors import (
    CodeDigestError,
    CodeEncoderError,
    CodeError,
    CodeFormatError,
    CodePrefixError,
    CodeVersionError,
    NonFiniteError,
)
from scd_core.packing import Packer
from scd_core.wire import CodePage, read_page, read_pages, write_page

ENCODER, PREFIX = bytes(range(16)), bytes(range(16, 32))
COLUMNS = 24
PACKER = Packer(COLUMNS)
FLOATS = Packer(COLUMNS, "float32")


def page(index: int = 3, tokens: int = 8, prefix: bytes = PREFIX) -> CodePage:
    codes = torch.randint(
        -128, 128, (tokens, COLUMNS), dtype=torch.int8, generator=torch.Generator().manual_seed(index)
    )
    return CodePage(ENCODER, prefix, index, tokens, codes)


def opened(data: bytes, packer: Packer = PACKER, **expected: bytes) -> CodePage:
    return read_page(data, packer=packer, **{"encoder_digest": ENCODER, "prefix_hash": PREFIX, **expected})


def resealed(data: bytes, offset: int, new: bytes) -> bytes:
    """``data`` with bytes replaced and a digest that agrees: a fault of the writer, not of the way."""
    body = data[:offset] + new + data[offset + len(new) : -wire.DIGEST_BYTES]
    return body + wire._digest(body)


GOOD = write_page(page(), PACKER)


@pytest.mark.parametrize("tokens", [1, 31, 32])
@pytest.mark.parametrize("packer", [PACKER, Packer(COLUMNS, "bfloat16"), FLOATS])
def test_a_page_is_read_as_it_was_written(tokens, packer):
    codes = page(tokens=tokens).codes.to(packer.dtype)
    found = opened(write_page(CodePage(ENCODER, PREFIX, 7, tokens, codes), packer), packer)
    assert (found.encoder_digest, found.prefix_hash, found.index, found.tokens) == (ENCODER, PREFIX, 7, tokens)
    assert torch.equal(found.codes, codes)
    assert found.codes.dtype == codes.dtype


def test_a_known_page_has_these_bytes():
    """Pins version 1: a change of layout without a change of version would be read as garbage by older peers."""
    packer = Packer(2, "float32")
    data = write_page(CodePage(ENCODER, PREFIX, 5, 1, torch.tensor([[1.0, -2.0]])), packer)
    assert data[:-16] == (
        b"SCDC"
        + struct.pack("<HH", 1, 2)
        + ENCODER
        + PREFIX
        + struct.pack("<IIIQ", 5, 1, 2, 8)
        + struct.pack("<ff", 1, -2)
    )


def test_every_flipped_bit_is_refused():
    for position in range(len(GOOD)):
        for bit in range(8):
            broken = bytearray(GOOD)
            broken[position] ^= 1 << bit
            with pytest.raises(CodeError):
                opened(bytes(broken))


@pytest.mark.parametrize("where", ["index", "payload", "digest"])
def test_a_change_on_the_way_is_a_digest_error(where):
    offset = {"index": 40, "payload": wire._HEADER.size + 2, "digest": len(GOOD) - 1}[where]
    broken = bytearray(GOOD)
    broken[offset] ^= 1
    with pytest.raises(CodeDigestError):
        opened(bytes(broken))


def test_every_truncation_and_extension_is_refused():
    for data in [*(GOOD[:n] for n in range(len(GOOD))), GOOD + b"\0", b"\0" + GOOD, GOOD + GOOD]:
        with pytest.raises(CodeFormatError):
            opened(data)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_refused_by_name(junk, with_magic):
    for data in (junk, b"SCDC\x01\x00" + junk, GOOD[: wire._HEADER.size] + junk) if with_magic else (junk,):
        with pytest.raises(CodeError):
            opened(data)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, wire._HEADER.size - 1), st.binary(min_size=1, max_size=8))
def test_a_writer_that_lies_is_refused_by_name(offset, new):
    """Digests agree here, so only the checks of the fields stand between a hostile length and an allocation."""
    new = new[: wire._HEADER.size - offset]
    data = resealed(GOOD, offset, new)
    try:
        found = opened(data)
    except CodeError:
        return
    # only the page's number is not for this function to judge
    assert torch.equal(found.codes, page().codes)


@pytest.mark.parametrize(
    ("offset", "new", "error"),
    [
        (0, b"SCDX", CodeFormatError),
        (4, struct.pack("<H", 2), CodeVersionError),
        (6, struct.pack("<H", 1), CodeFormatError),
        (6, struct.pack("<H", 9), CodeFormatError),
        (44, struct.pack("<I", 0), CodeFormatError),
        (44, struct.pack("<I", 9), CodeFormatError),
        (44, struct.pack("<I", 2**32 - 1), CodeFormatError),
        (48, struct.pack("<I", COLUMNS + 1), CodeFormatError),
        (52, struct.pack("<Q", 2**63), CodeFormatError),
    ],
)
def test_each_field_has_its_error(offset, new, error):
    with pytest.raises(error):
        opened(resealed(GOOD, offset, new))


def test_a_newer_version_is_told_from_noise_even_when_its_layout_differs():
    with pytest.raises(CodeVersionError, match="version 2"):
        opened(b"SCDC\x02\x00")


def test_another_encoders_page_is_refused():
    with pytest.raises(CodeEncoderError, match=ENCODER.hex()):
        opened(GOOD, encoder_digest=bytes(16))


def test_another_prefix_is_refused():
    with pytest.raises(CodePrefixError, match=PREFIX.hex()):
        opened(GOOD, prefix_hash=bytes(16))


def test_a_wrong_count_of_columns_is_refused():
    with pytest.raises(CodeFormatError):
        opened(GOOD, Packer(COLUMNS + 1))
    with pytest.raises(CodeFormatError):
        read_page(GOOD, packer=PACKER, encoder_digest=ENCODER, prefix_hash=PREFIX, columns=COLUMNS + 1)


def test_non_finite_codes_are_refused_when_written_and_when_read():
    """Qwen3#826: an overflow upstream must end as a fallback, not as an answer of exclamation marks."""
    with pytest.raises(NonFiniteError):
        write_page(CodePage(ENCODER, PREFIX, 0, 1, torch.full((1, COLUMNS), torch.inf)), FLOATS)
    good = write_page(CodePage(ENCODER, PREFIX, 0, 1, torch.ones(1, COLUMNS)), FLOATS)
    with pytest.raises(NonFiniteError):
        opened(resealed(good, wire._HEADER.size, struct.pack("<f", float("nan"))), FLOATS)


def test_many_pages_are_read_in_their_order():
    prefixes = [bytes([n]) * 16 for n in range(4)]
    written = [page(n, 8, p) for n, p in enumerate(prefixes)]
    data = [write_page(p, PACKER) for p in written]
    kwargs = {"packer": PACKER, "encoder_digest": ENCODER}
    found = read_pages(data[1:], prefix_hashes=prefixes[1:], first_index=1, **kwargs)
    assert torch.equal(found, torch.cat([p.codes for p in written[1:]]))
    with pytest.raises(CodePrefixError):
        read_pages(data[::-1], prefix_hashes=prefixes, **kwargs)
    with pytest.raises(CodePrefixError):
        read_pages(data[:3], prefix_hashes=prefixes, **kwargs)
    with pytest.raises(CodePrefixError):
        read_pages(data[1:], prefix_hashes=prefixes[1:], first_index=0, **kwargs)
    with pytest.raises(CodeDigestError):
        read_pages([*data[:3], data[3][:-1] + bytes([data[3][-1] ^ 1])], prefix_hashes=prefixes, **kwargs)


@pytest.mark.parametrize(
    "fields",
    [
        (b"short", PREFIX, 0, 1),
        (ENCODER, b"short", 0, 1),
        (ENCODER, PREFIX, -1, 1),
        (ENCODER, PREFIX, 0, 0),
        (ENCODER, PREFIX, 0, 2),
    ],
)
def test_a_page_that_contradicts_itself_cannot_be_made(fields):
    with pytest.raises(CodeFormatError):
        CodePage(*fields, codes=torch.zeros(1, COLUMNS, dtype=torch.int8))
