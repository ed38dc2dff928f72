"""A corpus in memory: documents, or documents with a question and its answer, and their split.

Convention: an :class:`Example` is one document with, perhaps, one question about it. Examples whose
documents share text belong to one *document group*, and a split never cuts a group in two: windows cut
from one article overlap, and a figure measured on one half of a window that calibration saw is not held out.
What a corpus may be, and how it is read: :mod:`calibration.corpus`.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scd_core.errors import CorpusError

SHINGLE_WORDS = 8
SHARED_SHINGLES = 10


@dataclass(frozen=True, slots=True)
class Example:
    """One document (``context``), and a question about it where the corpus has one.

    ``alternatives`` are further right answers; ``document`` names what the context was cut from, if anything.
    """

    context: str
    question: str | None = None
    answer: str | None = None
    alternatives: tuple[str, ...] = ()
    document: str | None = None

    @property
    def user_message(self) -> str:
        """The text a client sends: the document first, so that specialists share it as a prefix."""
        return self.context if self.question is None else f"{self.context}\n\n{self.question}"

    @property
    def references(self) -> tuple[str, ...]:
        """Every right answer, the first one first."""
        return () if self.answer is None else (self.answer, *self.alternatives)

    @property
    def fingerprint(self) -> str:
        """Names the document in the provenance of an artefact, without holding its text."""
        return hashlib.blake2b(self.context.encode(), digest_size=8).hexdigest()


def document_groups(examples: Sequence[Example]) -> list[list[int]]:
    """Indices of the examples, grouped by document.

    Two examples belong together when they name the same ``document``, or when their contexts are equal or share
    more than ``SHARED_SHINGLES`` runs of ``SHINGLE_WORDS`` words. Groups and their members stand in the order of
    the corpus.
    """
    parent = list(range(len(examples)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    holders: dict[int, list[int]] = defaultdict(list)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    first_with: dict[str, int] = {}
    first_of: dict[str, int] = {}
    for i, example in enumerate(examples):
        if example.document is not None:
            parent[root(i)] = root(first_of.setdefault(example.document, i))
        same = first_with.setdefault(example.context, i)
        if same != i:
            parent[root(i)] = root(same)
            continue
        words = example.context.split()
        for start in range(max(0, len(words) - SHINGLE_WORDS + 1)):
            shingle = hash(tuple(words[start : start + SHINGLE_WORDS]))
            holding = holders[shingle]
            if holding and holding[-1] == i:
                continue
            for other in holding[:8]:
                shared[other, i] += 1
            holding.append(i)
    for (a, b), count in shared.items():
        if count > SHARED_SHINGLES:
            parent[root(b)] = root(a)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(examples)):
        groups[root(i)].append(i)
    return sorted(groups.values(), key=lambda group: group[0])


def split_by_document(
    examples: Sequence[Example], held_out: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """``(fit, held_out)``, about ``held_out`` of the examples in the second, no document in both.

    Raises:
        CorpusError: ``held_out`` is not in (0, 1), or the corpus has fewer than two documents.
    """
    if not 0 < held_out < 1:
        raise CorpusError(f"held_out must lie between 0 and 1, not {held_out}")
    groups = document_groups(examples)
    if len(groups) < 2:
        raise CorpusError(
            f"the corpus holds {len(groups)} document(s): a held-out split needs two at least; add documents"
        )
    random.Random(seed).shuffle(groups)
    wanted, taken = held_out * len(examples), 0
    kept: list[int] = []
    apart: list[int] = []
    for i, group in enumerate(groups):
        if taken < wanted and i < len(groups) - 1:
            apart += group
            taken += len(group)
        else:
            kept += group
    return [examples[i] for i in sorted(kept)], [examples[i] for i in sorted(apart)]
