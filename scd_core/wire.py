"""The wire format of a page of codes: version 1, little-endian, self-describing.

::

    magic  version dtype  encoder  prefix  index  tokens columns length  payload  digest
    "SCDC" u16     u16    16 bytes 16      u32    u32    u32     u64     length   16

``encoder`` and ``prefix`` say by which encoder and for which tokens (the chained hash of :mod:`scd_core.pages`)
the codes were made; ``digest`` is the blake2b of everything before it. A page is decoded only when all of them
are as expected: a refused page costs a native prefill, an accepted wrong one a wrong answer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from scd_core.errors import (
    CodeDigestError,
    CodeEncoderError,
    CodeFormatError,
    CodePrefixError,
    CodeVersionError,
)
from scd_core.packing import Packer
from scd_core.pages import HASH_BYTES

MAGIC = b"SCDC"
VERSION = 1
DIGEST_BYTES = 16
MAX_PAGE_TOKENS = 4096
_DTYPES = ("int8", "bfloat16", "float32")
_START = struct.Struct("<4sH")
_HEADER = struct.Struct("<4sHH16s16sIIIQ")
OVERHEAD = _HEADER.size + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class CodePage:
    """Codes ``[tokens, C]`` of page ``index`` of the prefix that ``prefix_hash`` names."""

    encoder_digest: bytes
    prefix_hash: bytes
    index: int
    tokens: int
    codes: Tensor

    def __post_init__(self) -> None:
        if len(self.encoder_digest) != DIGEST_BYTES or len(self.prefix_hash) != HASH_BYTES:
            raise CodeFormatError(
                f"encoder digest of {len(self.encoder_digest)} bytes and prefix hash of "
                f"{len(self.prefix_hash)}, not 16 each"
            )
        if not 0 <= self.index < 1 << 32 or not 1 <= self.tokens <= MAX_PAGE_TOKENS:
            raise CodeFormatError(f"page {self.index} of {self.tokens} tokens")
        if self.codes.ndim != 2 or self.codes.shape[0] != self.tokens:
            raise CodeFormatError(f"codes {tuple(self.codes.shape)} for {self.tokens} tokens")


@dataclass(frozen=True, slots=True)
class _Packed:
    index: int
    tokens: int
    payload: memoryview


def write_page(page: CodePage, packer: Packer) -> bytes:
    """The page's bytes.

    Raises:
        CodeFormatError: the codes are not what ``packer`` packs.
        NonFiniteError: unquantised codes hold NaN or infinity.
    """
    payload = packer.pack(page.codes)
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        _DTYPES.index(packer.code_dtype),
        page.encoder_digest,
        page.prefix_hash,
        page.index,
        page.tokens,
        packer.columns,
        len(payload),
    )
    body = header + payload
    return body + _digest(body)


def read_page(
    data: bytes | memoryview,
    *,
    packer: Packer,
    encoder_digest: bytes,
    prefix_hash: bytes,
    columns: int | None = None,
) -> CodePage:
    """The page that ``data`` holds, checked against what was asked for.

    Args:
        packer: of the encoder that ``encoder_digest`` names.
        columns: the caller's own count, where it has one; it must be the packer's.

    Raises:
        CodeFormatError: not a page, truncated, or its fields contradict each other or ``packer``.
        CodeVersionError: another version of this format.
        CodeDigestError: a byte changed on the way.
        CodeEncoderError: made by another encoder.
        CodePrefixError: made for other tokens.
        NonFiniteError: unquantised codes hold NaN or infinity.
    """
    if columns is not None and columns != packer.columns:
        raise CodeFormatError(f"{columns} columns expected, the packer has {packer.columns}")
    found = _open(data, packer, encoder_digest, prefix_hash)
    codes = packer.unpack(found.payload, found.tokens)
    return CodePage(encoder_digest, prefix_hash, found.index, found.tokens, codes)


def read_pages(
    pages: Sequence[bytes | memoryview],
    *,
    packer: Packer,
    encoder_digest: bytes,
    prefix_hashes: Sequence[bytes],
    first_index: int = 0,
) -> Tensor:
    """Codes ``[sum of tokens, C]`` of consecutive pages from page ``first_index`` on; faster than one by one.

    Raises:
        CodeError: as :func:`read_page`; also when pages are missing, or not in order (CodePrefixError).
    """
    if len(pages) != len(prefix_hashes):
        raise CodePrefixError(f"{len(pages)} pages for {len(prefix_hashes)} prefix hashes")
    found = [_open(d, packer, encoder_digest, h) for d, h in zip(pages, prefix_hashes, strict=True)]
    indices = [f.index for f in found]
    if indices != list(range(first_index, first_index + len(found))):
        raise CodePrefixError(f"pages {indices}, expected {len(found)} from {first_index}")
    return packer.unpack_pages([f.payload for f in found], [f.tokens for f in found])


def _open(data: bytes | memoryview, packer: Packer, encoder_digest: bytes, prefix_hash: bytes) -> _Packed:
    view = memoryview(data)
    if len(view) < _START.size:
        raise CodeFormatError(f"{len(view)} bytes are no page of codes")
    magic, version = _START.unpack_from(view)
    if magic != MAGIC:
        raise CodeFormatError("not a page of codes: wrong magic")
    if version != VERSION:
        raise CodeVersionError(f"wire format version {version}; this program reads {VERSION}")
    if len(view) < OVERHEAD:
        raise CodeFormatError(f"{len(view)} bytes, a page has at least {OVERHEAD}: truncated")
    _, _, dtype, encoder, prefix, index, tokens, columns, length = _HEADER.unpack_from(view)
    if len(view) != OVERHEAD + length:
        raise CodeFormatError(f"{len(view)} bytes, the header says {OVERHEAD + length}: truncated or too long")
    if _digest(view[:-DIGEST_BYTES]) != view[-DIGEST_BYTES:]:
        raise CodeDigestError(f"page {index}: a byte changed on the way")
    if encoder != encoder_digest:
        raise CodeEncoderError(f"page {index}: encoder {encoder.hex()}, expected {encoder_digest.hex()}")
    if prefix != prefix_hash:
        raise CodePrefixError(f"page {index}: prefix {prefix.hex()}, expected {prefix_hash.hex()}")
    if dtype >= len(_DTYPES) or _DTYPES[dtype] != packer.code_dtype:
        raise CodeFormatError(f"page {index}: code dtype {dtype}, the encoder makes {packer.code_dtype}")
    if columns != packer.columns or not 1 <= tokens <= MAX_PAGE_TOKENS:
        raise CodeFormatError(
            f"page {index}: {tokens} tokens of {columns} columns, the encoder makes {packer.columns}"
        )
    return _Packed(index, tokens, view[_HEADER.size : -DIGEST_BYTES])


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, person=b"scd-code").digest()
