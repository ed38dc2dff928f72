"""Prompts of a wanted length in tokens, no two of which share a page.

A prompt opens with a number of its own, so its first page, and with it every page's chained hash, is new to every
cache. The client holds no tokenizer: how many tokens a word costs is learned from two of the server's own counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out so up
said what its about than into them can only other time new some could these two may first then do any
like my now over such our man me even most made after also did many off before must well back through
years much where your way down should because long each just state people those too mr how little good
world make very year still see own work men day get here between both life being under three never know
same last another while us might great old go since against came right used take three house water city
river music station north film army school church
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Source:
    """Where words come from: a text's own order from a random place, or common words at random."""

    words: tuple[str, ...] = tuple(WORDS)
    running_text: bool = False

    def prompt(self, words: int, rng: random.Random) -> str:
        """A document of about ``words`` words that starts like no other, and a question about it."""
        if self.running_text:
            start = rng.randrange(len(self.words))
            body = [self.words[(start + i) % len(self.words)] for i in range(words)]
        else:
            body = rng.choices(self.words, k=words)
        return f"No. {rng.getrandbits(48)}: {' '.join(body)}\n\nWhat is this about?"


@dataclass(frozen=True, slots=True)
class Scale:
    """``tokens = per_word * words + fixed``."""

    per_word: float
    fixed: float

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


def learn_scale(source: Source, rng: random.Random, count: Callable[[str], int]) -> Scale:
    """From the token counts of a short and a longer prompt; ``count`` asks the server."""
    few, many = 50, 400
    short, long = count(source.prompt(few, rng)), count(source.prompt(many, rng))
    per_word = (long - short) / (many - few)
    return Scale(per_word, short - per_word * few)
