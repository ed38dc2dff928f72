"""The two demo specialists' tasks, as examples drawn from documents by fixed rules.

``blank``: a sentence of the document with ____ in place of one phrase; the answer is the phrase.
``facts``: a list of keys; the answer is one line of JSON with the first fact of each kind in the document.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

from calibration.corpus import Example

_YEAR = re.compile(r"\b(1[0-9]{3}|20[0-9]{2})\b")
_NUMBER = re.compile(r"(?<![\w.,-])(\d{1,3}(?:,\d{3})+|\d+\.\d+|\d{1,3})(?![\w,-]|\.\d)")
_NAME = re.compile(r"\b([A-Z][a-z]+(?: [A-Z][a-z]+)+)\b")
_KINDS = {"year": _YEAR, "number": _NUMBER, "name": _NAME}


def facts_of(document: str, keys: Sequence[str]) -> str:
    """One line of JSON: for each key the first such fact of ``document``, or null where it has none."""
    found = {key: match.group(1) if (match := _KINDS[key].search(document)) else None for key in keys}
    return json.dumps(found, ensure_ascii=False)


def facts_examples(documents: Sequence[str], seed: int) -> list[Example]:
    """One ``facts`` example for each document: two of the three keys, in an order drawn from ``seed``."""
    rng = random.Random(seed)
    examples = []
    for document in documents:
        keys = rng.sample(sorted(_KINDS), 2)
        question = f"Facts as JSON: {', '.join(keys)}"
        examples.append(Example(document, question, facts_of(document, keys)))
    return examples
