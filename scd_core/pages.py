"""Pages of a prompt: the unit of hashing, coding, caching and seeding.

Convention: page ``i`` covers tokens ``[i * page_size, (i + 1) * page_size)``. Only full pages have a hash, and a
hash names *everything up to* its page's end, so that equal hashes mean equal prefixes.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

PAGE = 32
"""Tokens in a page. The engine's default is 256: too coarse for prompts of a few hundred tokens."""

HASH_BYTES = 16


def page_hashes(token_ids: Sequence[int], page_size: int = PAGE, salt: bytes = b"") -> list[bytes]:
    """The chained hash (blake2b, 16 bytes) of every full page of ``token_ids``.

    Args:
        salt: keeps prefixes of different tenants apart; equal salts share, others never meet.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    previous = hashlib.blake2b(salt, digest_size=HASH_BYTES, person=b"scd-page").digest()
    found = []
    for stop in range(page_size, len(token_ids) + 1, page_size):
        page = array("q", token_ids[stop - page_size : stop])
        previous = hashlib.blake2b(previous + _little_endian(page), digest_size=HASH_BYTES).digest()
        found.append(previous)
    return found


def coded_tokens(prompt_tokens: int, page_size: int, held_back: int) -> int:
    """How many leading tokens of a prompt may come from codes: a multiple of ``page_size``, 0 when too short.

    At least ``held_back`` tokens are left to be prefilled natively.
    """
    if page_size < 1 or held_back < 0:
        raise ValueError(f"page_size {page_size} must be positive, held_back {held_back} not negative")
    return max(0, prompt_tokens - held_back) // page_size * page_size


def _little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
