"""Measures one specialist that is handed the content of a prompt's first tokens by some method.

Convention: ``coded`` is the number of leading tokens that a method hands over (a multiple of the page); the rest
of the prompt is prefilled natively on top, as in serving. The clock of a time to first token runs at the
specialist alone: from the parcel in hand to the first token's id, opening the parcel included.

Shapes: T tokens, L layers, C = kv_dim, V vocabulary, A tokens of the oracle's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from calibration.metrics import agreement_per_position, kl_per_position
from scd_core.capture import ContentKV, StateChunk, capture_all
from scd_core.codec import SINK_TOKENS
from scd_core.engine import end_ids
from scd_core.huggingface import LoadedModel


@dataclass(frozen=True, slots=True)
class PrefixState:
    """What the producer holds of the coded tokens.

    ``residuals`` holds the residual stream ``[T, hidden]`` at the input of the layers that a method asked for.
    """

    token_ids: list[int]
    state: StateChunk
    residuals: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What crosses the wire: its size, and the specialist's work on it (given its own sink tokens' content)."""

    nbytes: int
    open: Callable[[ContentKV], ContentKV]


class Method(Protocol):
    """One way to hand a prefix over. The producer's side, :meth:`send`, is not on the specialist's clock."""

    name: str

    def send(self, prefix: PrefixState) -> Parcel: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """The oracle's run: its answer (with the end token, where it came), logits ``[A, V]``, time to first token."""

    answer: list[int]
    logits: Tensor
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A method's run: its own greedy answer, and KL and agreement per token of the oracle's answer."""

    answer: list[int]
    kl: list[float]
    agreement: list[float]
    ttft_s: float


class Harness:
    """Runs a specialist natively, or from handed-over content; greedy, at most ``max_new`` tokens."""

    def __init__(self, specialist: LoadedModel, max_new: int = 24) -> None:
        self.specialist = specialist
        self.max_new = max_new
        self.stop_ids = frozenset(end_ids(specialist))
        self._sinks: dict[tuple[int, ...], ContentKV] = {}

    def sinks(self, token_ids: Sequence[int]) -> ContentKV:
        """The specialist's own content of the first tokens; kept, since templates begin alike, as in serving."""
        first = tuple(token_ids[:SINK_TOKENS])
        if first not in self._sinks:
            self._sinks[first] = capture_all(self.specialist, first).content
        return self._sinks[first]

    def oracle(self, token_ids: Sequence[int]) -> Reference:
        """The specialist's full prefill and greedy answer."""
        began = time.perf_counter()
        logits, cache = self._run(token_ids, None, 0, 1)
        answer = [int(logits.argmax(-1))]
        ttft = time.perf_counter() - began
        seen = [logits]
        while not self._ended(answer):
            logits, cache = self._run(answer[-1:], cache, len(token_ids) + len(answer) - 1, 1)
            answer.append(int(logits.argmax(-1)))
            seen.append(logits)
        return Reference(answer, torch.cat(seen), ttft)

    def answer(self, token_ids: Sequence[int], coded: int, parcel: Parcel, reference: Reference) -> Outcome:
        """The run on top of a parcel that holds the first ``coded`` tokens, against the oracle's."""
        sinks, rest = self.sinks(token_ids), list(token_ids[coded:])
        began = time.perf_counter()
        content = parcel.open(sinks)
        first, cache = self._run(rest, self._cache(content, coded), coded, 1)
        int(first.argmax(-1))
        ttft = time.perf_counter() - began
        logits = first
        if len(reference.answer) > 1:
            forced = self._run(reference.answer[:-1], cache, len(token_ids), len(reference.answer) - 1)[0]
            logits = torch.cat([first, forced])
        agreement = agreement_per_position(reference.logits, logits)
        return Outcome(
            self._own_answer(rest, content, coded, reference.answer, logits.argmax(-1).tolist()),
            kl_per_position(reference.logits, logits).tolist(),
            agreement.tolist(),
            ttft,
        )

    def logits_behind(self, token_ids: Sequence[int], coded: int, parcel: Parcel | None) -> tuple[Tensor, float]:
        """``(logits behind the first coded tokens [T - coded, V], seconds)``; native without a parcel."""
        sinks = self.sinks(token_ids)
        began = time.perf_counter()
        if parcel is None:
            logits = self._run(token_ids, None, 0, len(token_ids) - coded)[0]
        else:
            rest = token_ids[coded:]
            logits = self._run(rest, self._cache(parcel.open(sinks), coded), coded, len(rest))[0]
        int(logits[-1].argmax())  # waits for an accelerator to finish
        return logits, time.perf_counter() - began

    def _own_answer(
        self, rest: list[int], content: ContentKV, coded: int, oracle: list[int], chosen: list[int]
    ) -> list[int]:
        """The greedy answer, generated only from where it leaves the oracle's (``chosen`` is under forcing)."""
        agreed = next((i for i, (a, b) in enumerate(zip(oracle, chosen, strict=True)) if a != b), len(oracle))
        answer = oracle[:agreed] + chosen[agreed : agreed + 1]
        if self._ended(answer):
            return answer
        pending, cache = rest + answer, self._cache(content, coded)
        position = coded
        while not self._ended(answer):
            logits, cache = self._run(pending, cache, position, 1)
            position += len(pending)
            pending = [int(logits.argmax(-1))]
            answer = answer + pending
        return answer

    def _ended(self, answer: list[int]) -> bool:
        return len(answer) >= self.max_new or answer[-1] in self.stop_ids

    def _cache(self, content: ContentKV, coded: int) -> Any:
        positions = torch.arange(coded, device=self.specialist.device)
        return self.specialist.cache_from(content.keys, content.values, positions)

    @torch.inference_mode()
    def _run(self, token_ids: Sequence[int], cache: Any, start: int, keep: int) -> tuple[Tensor, Any]:
        """``(logits of the last keep tokens [keep, V], the cache grown by the tokens)``."""
        device = self.specialist.device
        output = self.specialist.model(
            input_ids=torch.tensor([list(token_ids)], device=device),
            position_ids=torch.arange(start, start + len(token_ids), device=device)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits[0].float(), output.cache
