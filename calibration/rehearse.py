"""A fixed set of prefixes on which configurations of patched layers are compared.

Everything that does not depend on the configuration is computed once: the producer's codes, the specialist's own
logits, and each layer's keys and values both reused and patched. A configuration then costs one forward over the
few tokens behind each prefix, on a cache composed of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from calibration.distill import Classroom, Lesson
from scd_core.capture import ContentKV
from scd_core.codec import Decoder, Encoder
from scd_core.huggingface import LoadedModel

Prepared = tuple[Tensor, Tensor, Tensor, Tensor]


class Rehearsal(Classroom):
    """Measures compositions of a REUSE decoder's layers and a PATCH decoder's.

    ``encoder`` holds the streams of both, so that one pass of the producer serves all configurations.
    """

    def __init__(
        self, producer: LoadedModel, specialist: LoadedModel, encoder: Encoder, lessons: Sequence[Lesson]
    ) -> None:
        super().__init__(producer, specialist, encoder)
        self.lessons = tuple(lessons)
        self._prepared: dict[int, Prepared] = {}
        for lesson in tqdm(self.lessons, desc="rehearse"):
            self._prepared[id(lesson)] = super().prepare(lesson)
        self._reused: list[ContentKV] = []
        self._patched: list[ContentKV] = []

    def prepare(self, lesson: Lesson) -> Prepared:
        """What was computed for this lesson at the start."""
        return self._prepared[id(lesson)]

    def reuse(self, decoder: Decoder) -> None:
        """Sets the content of layers that are not patched."""
        self._reused = self._decode(decoder)

    def patch(self, decoder: Decoder) -> None:
        """Sets the content of layers that are."""
        self._patched = self._decode(decoder)

    @torch.no_grad()
    def quality(self, layers: frozenset[int]) -> float:
        """Minus the weighted KL behind the prefix in nats, mean over the lessons, with ``layers`` patched."""
        where = sorted(layers)
        total = 0.0
        for lesson, reused, patched in zip(self.lessons, self._reused, self._patched, strict=True):
            keys, values = reused.keys.clone(), reused.values.clone()
            keys[where], values[where] = patched.keys[where], patched.values[where]

            def composed(*_: Any, kv: tuple[Tensor, Tensor] = (keys, values)) -> tuple[Tensor, Tensor]:
                return kv

            kl = self.kl(lesson, composed)
            weights = lesson.weights.to(kl.device)
            total += float((kl * weights).sum() / weights.sum())
        return -total / len(self.lessons)

    @torch.no_grad()
    def _decode(self, decoder: Decoder) -> list[ContentKV]:
        prefixes = [(self.prepare(lesson)[0], lesson.ids[: lesson.coded]) for lesson in self.lessons]
        return [decoder.decode(codes, ids, self.specialist) for codes, ids in prefixes]
