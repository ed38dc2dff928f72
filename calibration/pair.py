"""The two models of a pair, and every method between them, run on the same producer state.

Convention: a :class:`Task` is a prompt and the number of its leading tokens that methods hand over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from calibration.baselines import Int4, Raw
from calibration.corpus import Example
from calibration.droidspeak import DroidSpeak, capture_prefix, profile_critical_layers
from calibration.harness import Harness, Method, PrefixState
from calibration.methods import Coded
from calibration.metrics import (
    agreement_per_position,
    answer_exact,
    answer_f1,
    kl_per_position,
    nll_per_position,
)
from calibration.report import Answered, Scored
from scd_core.huggingface import LoadedModel

MAX_NEW = 24


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, the number of its leading tokens that methods hand over, and the question it came from."""

    token_ids: list[int]
    coded: int
    example: Example | None = None


class Pair:
    """The two models, and the methods between them."""

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, codecs: Sequence[Coded]) -> None:
        self.producer, self.specialist = producer, specialist
        self.harness = Harness(specialist, MAX_NEW)
        self.codecs = list(codecs)
        self.methods: list[Method] = []
        self._residual_layers: list[int] = []

    @property
    def raw_bytes_per_token(self) -> int:
        """Keys and values of all layers in bfloat16."""
        return 2 * self.specialist.layers * self.specialist.kv_dim * 2

    def prepare(self, fit: Sequence[Task]) -> tuple[int, int]:
        """Makes the methods; ``fit`` profiles DroidSpeak's critical layers, which are returned."""
        critical = profile_critical_layers(
            self.producer, self.harness, [(task.token_ids, task.coded) for task in fit]
        )
        selective = DroidSpeak(self.producer, self.specialist, *critical)
        self._residual_layers = selective.residual_layers
        two = (False, True)
        self.methods = [
            *(Raw(self.producer, self.specialist, rerotate=r) for r in two),
            *(Int4(self.producer, self.specialist, rerotate=r) for r in two),
            selective,
            *self.codecs,
        ]
        return critical

    def prefix(self, task: Task) -> PrefixState:
        """The producer's state of a task's handed-over tokens, with all that any method asks for."""
        ids = task.token_ids[: task.coded]
        hidden = sorted({layer for codec in self.codecs for layer in codec.encoder.hidden_layers})
        return capture_prefix(self.producer, ids, hidden_layers=hidden, residual_layers=self._residual_layers)

    def answered(self, task: Task, example: Example) -> Iterator[Answered]:
        """The oracle's answer to a question, then each method's."""
        ids, prefix = task.token_ids, self.prefix(task)
        reference = self.harness.oracle(ids)
        tokens = len(reference.answer)

        def record(
            method: str, answer: list[int], kl: list[float], agreement: list[float], ttft_s: float, nbytes: int
        ) -> Answered:
            text = self.specialist.tokenizer.decode(answer, skip_special_tokens=True).strip()
            f1, exact = answer_f1(text, example.references), answer_exact(text, example.references)
            question = example.question or ""
            return Answered(
                method, example.fingerprint, question, example.references, text, f1, exact, kl, agreement, ttft_s,
                nbytes, len(ids), task.coded,
            )  # fmt: skip

        yield record("oracle", reference.answer, [0.0] * tokens, [1.0] * tokens, reference.ttft_s, 0)
        for method in self.methods:
            parcel = method.send(prefix)
            run = self.harness.answer(ids, task.coded, parcel, reference)
            yield record(method.name, run.answer, run.kl, run.agreement, run.ttft_s, parcel.nbytes)

    def scored(self, number: int, task: Task, *, compared: bool) -> Iterator[Scored]:
        """The oracle's logits behind a window's prefix, then each method's (``compared`` with it, if asked)."""
        ids, coded = task.token_ids, task.coded
        prefix = self.prefix(task)
        own: Tensor | None = None
        for name, parcel in [("oracle", None), *((m.name, m.send(prefix)) for m in self.methods)]:
            logits, seconds = self.harness.logits_behind(ids[:-1], coded, parcel)
            own = logits if own is None else own
            yield Scored(
                name,
                number,
                nll_per_position(logits, ids[coded + 1 :]).tolist(),
                kl_per_position(own, logits).tolist() if compared else [],
                agreement_per_position(own, logits).tolist() if compared else [],
                seconds,
                0 if parcel is None else parcel.nbytes,
                coded,
            )
