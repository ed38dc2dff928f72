"""PATCH of the paper: the aligner from the code of the producer's hidden input to the specialist's.

It starts as the linear map that moments give, and a residual MLP, zero at first, learns what is left on pairs of
(code, specialist's H_in) from a buffer of fixed size. The linear part stays: least squares has solved it, in the
metric of the hidden state and in that of keys and values alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from scd_core.capture import capture_all
from scd_core.codec import SINK_TOKENS, Encoder, PatchLayer
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``[T, hidden]`` to the specialist's keys and values, ``[T, kv_dim]`` each."""


@dataclass(frozen=True, slots=True)
class AlignerSettings:
    """``width`` of the MLP (0: linear), and its training.

    ``metric`` weighs the error as it is (``hidden``, the paper's), or as the specialist's keys and values see it
    (``kv``). The last ``validation`` of the buffer judges: the best state of the run is kept, perhaps the start.
    """

    width: int = 256
    steps: int = 240
    batch: int = 256
    rate: float = 2e-3
    metric: Literal["hidden", "kv"] = "hidden"
    validation: float = 0.1
    check_every: int = 40
    seed: int = 0


class PairBuffer:
    """At most ``capacity`` tokens of codes ``[T, C]``, and per layer of the specialist's H_in ``[T, d]``."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tokens = capacity, 0
        self._codes: list[Tensor] = []
        self._hidden: dict[int, list[Tensor]] = {}

    @property
    def full(self) -> bool:
        return self.tokens >= self.capacity

    def add(self, codes: Tensor, hidden: dict[int, Tensor]) -> None:
        """Takes a prompt's tokens, as many as there is room for."""
        room = self.capacity - self.tokens
        # codes stay as they go over the wire, so that the aligner learns with their rounding
        self._codes.append(codes[:room].cpu())
        for layer, states_TD in hidden.items():
            self._hidden.setdefault(layer, []).append(states_TD[:room].float().cpu())
        self.tokens += self._codes[-1].shape[0]

    def pairs(self, encoder: Encoder, layer: int) -> tuple[Tensor, Tensor]:
        """``[T, r]`` coefficients and ``[T, hidden]`` targets of one layer, float32.

        Raises:
            CorpusError: the buffer is empty.
        """
        if self.tokens < 2:
            raise CorpusError("no prompt is long enough to train an aligner on")
        codes = torch.cat([codes[:, encoder.slices[layer, "h"]] for codes in self._codes])
        return codes.float(), torch.cat(self._hidden[layer])


def collect_pairs(
    producer: LoadedModel,
    specialist: LoadedModel,
    encoder: Encoder,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    seed: int,
) -> PairBuffer:
    """Pairs of the encoder's hidden layers from prompts in random order, until the buffer is full."""
    layers = encoder.hidden_layers
    buffer = PairBuffer(capacity)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    with tqdm(total=capacity, desc="aligner pairs", unit="token") as progress:
        for index in order:
            if buffer.full:
                break
            before = buffer.tokens
            codes = encoder.encode(capture_all(producer, prompts[index], hidden_layers=layers))
            target = capture_all(specialist, prompts[index], hidden_layers=layers).hidden
            buffer.add(codes[SINK_TOKENS:], {layer: h[SINK_TOKENS:] for layer, h in target.items()})
            progress.update(buffer.tokens - before)
    return buffer


def fit_aligners(
    producer: LoadedModel,
    specialist: LoadedModel,
    encoder: Encoder,
    starts: Mapping[int, PatchLayer],
    prompts: Sequence[Sequence[int]],
    settings: AlignerSettings,
    capacity: int,
    folder: Path | None = None,
) -> tuple[dict[int, PatchLayer], dict[str, dict[str, float]]]:
    """One aligner per layer of ``starts``, trained on at most ``capacity`` tokens.

    Args:
        encoder: holds the hidden inputs' streams of these layers, and no others.
        folder: keeps each aligner as it is done; those found there are not trained again.

    Returns:
        The aligners, and per layer the errors of :func:`fit_aligner`.
    """
    paths = {layer: folder / f"aligner.{layer}.safetensors" if folder else None for layer in starts}
    done = {layer: _read(path) for layer, path in paths.items() if path is not None and path.exists()}
    patches = {layer: patch for layer, (patch, _) in done.items()}
    errors = {str(layer): error for layer, (_, error) in done.items()}
    left = [layer for layer in starts if layer not in done]
    if not left:
        return patches, errors
    buffer = collect_pairs(producer, specialist, encoder, prompts, capacity, settings.seed)
    for layer in tqdm(left, desc="aligners"):
        codes, target = (pair.to(specialist.device) for pair in buffer.pairs(encoder, layer))
        project = partial(specialist.project, layer)
        patches[layer], errors[str(layer)] = fit_aligner(codes, target, starts[layer], settings, project)
        if (path := paths[layer]) is not None:
            _write(path, patches[layer], errors[str(layer)])
    return patches, errors


def _write(path: Path, patch: PatchLayer, errors: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    tensors = {name: getattr(patch, name).contiguous() for name in PatchLayer.__dataclass_fields__}
    save_file(tensors, draft, {"errors": json.dumps(errors)})
    os.replace(draft, path)


def _read(path: Path) -> tuple[PatchLayer, dict[str, float]]:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in PatchLayer.__dataclass_fields__}
            return PatchLayer(**tensors), json.loads(file.metadata()["errors"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: not an aligner ({error}); delete it to start afresh") from error


def linear_aligner(weight: Tensor, bias: Tensor, width: int = 0) -> PatchLayer:
    """The affine map alone, with a residual of ``width`` units that adds nothing."""
    hidden = weight.shape[1]
    return PatchLayer(
        weight.float(),
        bias.float(),
        torch.zeros(hidden, width),
        torch.zeros(width),
        torch.zeros(width, hidden),
        torch.zeros(hidden),
    )


def fit_aligner(
    codes: Tensor,
    target: Tensor,
    start: PatchLayer,
    settings: AlignerSettings,
    project: Projection | None = None,
) -> tuple[PatchLayer, dict[str, float]]:
    """Trains the residual of ``start`` on pairs: ``codes`` ``[T, r]`` and ``target`` ``[T, hidden]``.

    Args:
        project: the specialist's projections of this layer; needed by the metric ``kv``.

    Returns:
        The aligner, and its validation error relative to the target's variance before and after.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    kept = max(1, round(len(codes) * (1 - settings.validation)))
    if kept == len(codes):
        kept -= 1
    error = _Error(target[:kept], settings.metric, project)
    with torch.no_grad():
        linear = codes @ start.weight + start.bias
    module = _Residual(linear[:kept], settings.width, generator)
    best, before = linear_aligner(start.weight, start.bias), _validate(error, linear, module, target, kept)
    after = before
    if settings.width == 0:
        return best, {"linear": before, "aligner": before}
    optimizer = torch.optim.Adam(module.parameters(), lr=settings.rate)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        rows = torch.randint(kept, (settings.batch,), generator=generator)
        loss = error(linear[rows] + module(linear[rows]), target[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % settings.check_every == 0 or step + 1 == settings.steps:
            now = _validate(error, linear, module, target, kept)
            if now < after:
                after, best = now, module.patch(start)
    return best, {"linear": before, "aligner": after}


class _Residual(nn.Module):
    """``gelu(h W1 + b1) W2 + b2``: unit variance at the hidden units, and zero at the end."""

    def __init__(self, sample: Tensor, width: int, generator: torch.Generator) -> None:
        super().__init__()
        hidden = sample.shape[1]
        # H_in has channels of very different size: standardised inputs, folded into the first matrix
        mean, deviation = sample.mean(0), sample.std(0, correction=0).clamp_min(1e-6)
        w1 = torch.randn(hidden, width, generator=generator) / math.sqrt(hidden)
        self.mean, self.deviation = mean, deviation
        self.w1 = nn.Parameter(w1)
        self.b1 = nn.Parameter(torch.zeros(width))
        self.w2 = nn.Parameter(torch.zeros(width, hidden))
        self.b2 = nn.Parameter(torch.zeros(hidden))

    def forward(self, h: Tensor) -> Tensor:
        x = (h - self.mean) / self.deviation
        return (nn.functional.gelu(x @ self.w1 + self.b1) @ self.w2 + self.b2) * self.deviation

    def patch(self, start: PatchLayer) -> PatchLayer:
        with torch.no_grad():
            w1 = self.w1 / self.deviation[:, None]
            return PatchLayer(
                start.weight,
                start.bias,
                w1,
                self.b1 - self.mean @ w1,
                self.w2 * self.deviation,
                self.b2 * self.deviation,
            )


class _Error:
    """Mean squared error relative to the variance of what is compared."""

    def __init__(self, target: Tensor, metric: str, project: Projection | None) -> None:
        if metric == "kv" and project is None:
            raise ValueError("the metric 'kv' needs the specialist's projections")
        self.project = project if metric == "kv" else None
        self.variances = [x.var(0, correction=0).mean().clamp_min(1e-12) for x in self._views(target)]

    def _views(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return (hidden,) if self.project is None else self.project(hidden)

    def __call__(self, guess: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self._views(target)
        parts = zip(self._views(guess), wanted, self.variances, strict=True)
        return torch.stack([(g - w).square().mean() / v for g, w, v in parts]).mean()


@torch.no_grad()
def _validate(error: _Error, linear: Tensor, module: _Residual, target: Tensor, kept: int) -> float:
    return float(error(linear[kept:] + module(linear[kept:]), target[kept:]))
