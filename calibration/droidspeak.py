"""Selective recomputation after DroidSpeak (arXiv 2411.02820): a run of critical layers is the specialist's own.

The producer sends its keys and values of all other layers, and the residual stream at the first critical layer;
the specialist runs its own critical layers on that, and takes the rest as it comes (re-rotated). Which layers are
critical is profiled once per pair: the contiguous run whose keys and values, made the specialist's own, bring the
logits behind the prefix nearest to the specialist's.

Shapes: L layers, T tokens, C = kv_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from calibration.harness import Harness, Parcel, PrefixState
from calibration.metrics import kl_per_position
from scd_core.capture import ContentKV, StateChunk, capture, capture_all
from scd_core.huggingface import LoadedModel, plain_shell

CRITICAL_SHARE = 0.2
"""So many of the layers are recomputed: DroidSpeak reports 11 to 25 % for pairs that need recomputation."""


def capture_prefix(
    producer: LoadedModel,
    token_ids: Sequence[int],
    *,
    hidden_layers: Sequence[int] = (),
    residual_layers: Sequence[int] = (),
) -> PrefixState:
    """``capture_all``, and with it the residual stream ``[T, hidden]`` at the input of ``residual_layers``."""
    parts: dict[int, list[Tensor]] = {layer: [] for layer in residual_layers}
    with ExitStack() as taps:
        for layer, found in parts.items():
            taps.enter_context(_tapped(producer.shell.base_model.layers[layer], found))
        chunks = list(capture(producer, token_ids, hidden_layers=hidden_layers))
    content = ContentKV.concat([chunk.content for chunk in chunks])
    hidden = {layer: torch.cat([chunk.hidden[layer] for chunk in chunks]) for layer in hidden_layers}
    residuals = {layer: torch.cat(found) for layer, found in parts.items()}
    return PrefixState(list(token_ids), StateChunk(0, content, hidden), residuals)


@contextmanager
def _tapped(layer: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Keeps the residual stream ``[T, hidden]`` that goes into ``layer``."""
    handle = layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0].float()))
    try:
        yield
    finally:
        handle.remove()


class LayerRun:
    """The layers ``first..last - 1`` of a model as a model of their own, over the same parameters."""

    def __init__(self, model: LoadedModel, first: int, last: int) -> None:
        shell: Any = plain_shell(model.model)
        types = model.signature.layer_types[first:last]
        shell.config.num_hidden_layers = last - first
        shell.config.layer_types = list(types)
        shell.base_model.layers = nn.ModuleList(list(shell.base_model.layers)[first:last])
        for index, layer in enumerate(shell.base_model.layers):
            layer.self_attn.layer_idx = index
        signature = replace(model.signature, layers=last - first, layer_types=types)
        self._part = replace(model, model=shell, signature=signature)

    def content(self, residual: Tensor | None, token_ids: Sequence[int]) -> ContentKV:
        """Content ``[last - first, T, C]`` from the residual stream ``[T, hidden]``; from the ids at layer 0."""
        prefill = self._part.prefill()
        if residual is None:
            return prefill.step(0, token_ids, ()).content
        with _fed(self._part.shell.base_model.layers[0], residual.to(self._part.device, self._part.dtype)):
            return prefill.step(0, token_ids, ()).content


@contextmanager
def _fed(layer: nn.Module, residual: Tensor) -> Iterator[None]:
    """Gives ``layer`` the residual stream ``[T, hidden]`` in the place of its input."""
    handle = layer.register_forward_pre_hook(lambda _, args: (residual[None], *args[1:]))
    try:
        yield
    finally:
        handle.remove()


class DroidSpeak:
    """Layers ``first..last - 1`` recomputed by the specialist from the residual stream at ``first``.

    Where the run begins at layer 0, nothing is sent for it: the ids are enough.
    """

    name = "droidspeak"

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.residual_layers = [first] if first else []
        self._producer = producer
        self._run = LayerRun(specialist, first, last)
        self._sent = [i for i in range(specialist.layers) if not first <= i < last]

    def send(self, prefix: PrefixState) -> Parcel:
        content = prefix.state.content
        positions = torch.arange(content.tokens, device=content.keys.device)
        keys = self._producer.rotate(content.keys[self._sent], positions, self._sent).bfloat16()
        values = content.values[self._sent].bfloat16()
        residual = prefix.residuals[self.first].bfloat16() if self.first else None

        def open_parcel(_: ContentKV) -> ContentKV:
            own = self._run.content(residual, prefix.token_ids)
            plain = self._producer.derotate(keys.float(), positions, self._sent)
            return ContentKV(_put(plain, own.keys, self.first), _put(values.float(), own.values, self.first))

        return Parcel(keys.nbytes + values.nbytes + (0 if residual is None else residual.nbytes), open_parcel)


def _put(others: Tensor, run: Tensor, first: int) -> Tensor:
    """All layers ``[L, T, C]``: ``run`` from layer ``first`` on, ``others`` around it."""
    return torch.cat([others[:first], run, others[first:]])


def _holding(content: ContentKV) -> Parcel:
    return Parcel(0, lambda _: content)


def profile_critical_layers(
    producer: LoadedModel,
    harness: Harness,
    prompts: Sequence[tuple[Sequence[int], int]],
    share: float = CRITICAL_SHARE,
) -> tuple[int, int]:
    """``(first, last + 1)`` of the critical run: the least KL behind the prefixes of ``prompts``.

    Args:
        prompts: token ids, and how many leading tokens are handed over.
        share: of the layers that are critical; one layer at least.
    """
    specialist = harness.specialist
    length = max(1, round(share * specialist.layers))
    totals = [0.0] * (specialist.layers - length + 1)
    for token_ids, coded in tqdm(prompts, desc="profile critical layers"):
        theirs = capture_all(producer, token_ids[:coded]).content
        own = capture_all(specialist, token_ids[:coded]).content
        teacher = harness.logits_behind(token_ids, coded, None)[0]
        for first in range(len(totals)):
            last = first + length
            mixed = ContentKV(
                torch.cat([theirs.keys[:first], own.keys[first:last], theirs.keys[last:]]),
                torch.cat([theirs.values[:first], own.values[first:last], theirs.values[last:]]),
            )
            logits = harness.logits_behind(token_ids, coded, _holding(mixed))[0]
            totals[first] += float(kl_per_position(teacher, logits).mean())
    best = min(range(len(totals)), key=totals.__getitem__)
    return best, best + length
