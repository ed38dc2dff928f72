"""Pages: hashes are keys of caches, so two different prefixes must never share one."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scd_core.pages import coded_tokens, page_hashes

IDS = list(range(1000, 1100))


def test_only_full_pages_have_a_hash():
    assert [len(page_hashes(IDS[:n], 32)) for n in (0, 31, 32, 33, 63, 64, 65)] == [0, 0, 1, 1, 1, 2, 2]


def test_a_hash_names_everything_before_it():
    # guards against hashing pages alone: the second page is equal, the first is not
    a, b = page_hashes(IDS[:64]), page_hashes([7, *IDS[1:64]])
    assert a[1] != b[1]
    # and against a chain that depends on what follows
    assert page_hashes(IDS)[:2] == a


def test_page_boundaries_are_part_of_the_hash():
    assert not set(page_hashes(IDS, 8)) & set(page_hashes(IDS, 16))


def test_salts_never_meet():
    """lmcache#4825: a dropped salt let one tenant hit another's prefix."""
    plain, a, b = page_hashes(IDS), page_hashes(IDS, salt=b"a"), page_hashes(IDS, salt=b"b")
    assert len({*plain, *a, *b}) == 3 * len(plain)


def test_hashes_agree_between_processes():
    # the producer and the specialist are different processes: Python's own seeded hash() would not do
    code = "from scd_core.pages import page_hashes; print(page_hashes(range(64), salt=b's')[1].hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == page_hashes(range(64), salt=b"s")[1].hex()


@given(st.integers(0, 10_000), st.integers(1, 256), st.integers(0, 256))
def test_coded_tokens_are_the_most_that_fit(prompt: int, page: int, held_back: int):
    coded = coded_tokens(prompt, page, held_back)
    assert coded % page == 0
    assert coded >= 0
    assert coded == 0 or coded + held_back <= prompt
    assert coded + page + held_back > prompt


@pytest.mark.parametrize(("page", "held_back"), [(0, 16), (-1, 16), (32, -1)])
def test_impossible_sizes_are_refused(page: int, held_back: int):
    with pytest.raises(ValueError, match="must be positive"):
        coded_tokens(100, page, held_back)
