"""How the next token is chosen from the logits, per request.

One place for greedy choice, temperature, top-k, top-p, seeds and log-probabilities. Each request owns a
``Choice``: its random stream is its own, so the same seed gives the same tokens in whatever company it is batched.

Log-probabilities are those of the model itself: of the raw logits, before temperature, top-k and top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """What a client asks of the generation.

    Args:
        max_tokens: at most so many tokens; None: as many as fit into the context.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep so many likeliest tokens; 0 keeps all.
        seed: makes the sampling reproducible; None draws a new one.
        stop: the text ends before any of these.
        logprobs: also report each token's log-probability and those of so many likeliest tokens; None: neither.
        ignore_eos: go on after the model's own end-of-sequence tokens.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        faults = [
            message
            for wrong, message in (
                (
                    self.max_tokens is not None and self.max_tokens < 1,
                    f"max_tokens must be at least 1, not {self.max_tokens}",
                ),
                (not 0 <= self.temperature <= 1e4, f"temperature must not be negative, but is {self.temperature}"),
                (not 0 < self.top_p <= 1, f"top_p must lie in (0, 1], but is {self.top_p}"),
                (self.top_k < 0, f"top_k must not be negative, but is {self.top_k}"),
                (isinstance(self.stop, str), "stop must be a tuple of strings, not one string"),
                (any(not stop for stop in self.stop), "a stop string must not be empty"),
                (
                    self.logprobs is not None and self.logprobs < 0,
                    f"logprobs must not be negative, but is {self.logprobs}",
                ),
            )
            if wrong
        ]
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Chosen(NamedTuple):
    """What is known of one generated token beside its id."""

    logprob: float | None
    top: list[tuple[int, float]] | None
    finite: bool


class Choice:
    """One request's way from logits to tokens, and the record of what it chose.

    The engine's thread appends to ``chosen`` before a token is delivered; whoever receives the token may read it.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.chosen: list[Chosen] = []
        self.prefilled = 0
        """Prompt tokens that were computed, not found in the prefix cache."""
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def __deepcopy__(self, memo: dict[int, Any]) -> Choice:
        return self  # a request that is evicted and requeued goes on with the same random stream

    def draw(self, logits_V: Tensor) -> int:
        """The next token from logits ``[V]``, by this request's parameters."""
        params = self.params
        if params.greedy:
            return int(logits_V.argmax())
        scaled, order = torch.sort(logits_V.float().cpu() / params.temperature, descending=True)
        if params.top_k:
            scaled = scaled[: params.top_k]
        probabilities = scaled.double().softmax(-1)
        cumulative = probabilities.cumsum(-1)
        # the first token is always kept; another is kept while those before it have not reached top_p
        kept = max(1, int((cumulative - probabilities < params.top_p).sum()))
        target = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[kept - 1]
        return int(order[min(int(torch.searchsorted(cumulative, target, right=True)), kept - 1)])

    def describe(self, logits_V: Tensor, token_id: int) -> tuple[float | None, list[tuple[int, float]] | None]:
        """Log-probability of the token and of the likeliest ones, from raw logits ``[V]``, if asked for."""
        if self.params.logprobs is None:
            return None, None
        logprobs = logits_V.float().log_softmax(-1)
        values, ids = logprobs.topk(min(self.params.logprobs, logprobs.numel()))
        return float(logprobs[token_id]), list(zip(ids.tolist(), values.tolist(), strict=True))


def choose(logits: Tensor, choices: list[Choice | None]) -> Tensor:
    """Choose a token in each of the first ``len(choices)`` rows of ``logits`` ``[N, V]``.

    Returns the logits changed in place such that the argmax of each such row is the token chosen. A row without a
    ``Choice`` stays as it is.
    """
    finite = logits[: len(choices)].amax(-1).isfinite().tolist()  # the maximum is NaN where any logit is NaN
    for row, (choice, is_finite) in enumerate(zip(choices, finite, strict=True)):
        if choice is None:
            continue
        if not is_finite or (choice.params.greedy and choice.params.logprobs is None):
            choice.chosen.append(Chosen(None, None, is_finite))
            continue
        token_id = choice.draw(logits[row])
        logprob, top = choice.describe(logits[row], token_id)
        choice.chosen.append(Chosen(logprob, top, True))
        if not choice.params.greedy:
            logits[row] = float("-inf")
            logits[row, token_id] = 0.0
    return logits
