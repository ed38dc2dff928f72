"""Decoders distilled on the specialist's own answers.

Squared error is the wrong loss: a ridge map that halves the error of keys and values triples the KL of the
answers. So a decoder starts as the identity (the specialist gets the producer's dequantised state) and is
fitted on KL(specialist's own logits || its logits over the decoded cache), through the frozen specialist, with
the quantiser in the loop and the sink tokens native: exactly what serving does.

A step costs one forward of the producer and one of the specialist over the prefix, and a forward and backward
over the few tokens behind it; one prefix of activations is alive at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from calibration.checkpoint import load_checkpoint, save_checkpoint
from scd_core.capture import capture_all
from scd_core.codec import (
    HELD_BACK,
    SINK_TOKENS,
    Decoder,
    Encoder,
    LayerDecoder,
    NativeLayer,
    ReuseLayer,
    producer_means,
    synthesis,
)
from scd_core.errors import CodeEncoderError, CorpusError
from scd_core.huggingface import LoadedModel
from scd_core.pages import coded_tokens


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How long, how fast, and how large a decoder.

    ``neighbours`` layers' codes on either side are read besides the layer's own; ``rank`` bounds the learned
    part of each layer's map (None: full). A share ``continuation`` of the prefixes is cut at an earlier page
    and scored on the document's own next ``window`` tokens, so that the decoder serves more than the task.
    """

    steps: int = 700
    batch: int = 2
    rate: float = 3e-3
    warmup: int = 10
    answer_weight: float = 4.0
    neighbours: int = 1
    rank: int | None = 64
    continuation: float = 0.3
    window: int = 96
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and of the answer (may be empty) that follows it."""

    prompt: list[int]
    answer: list[int]


class ReuseMap(nn.Module):
    """The learned part of one REUSE layer, in units of coefficients."""

    def __init__(self, encoder: Encoder, layer: int, neighbours: int, rank: int | None, last: int) -> None:
        super().__init__()
        self.first, self.last = max(0, layer - neighbours), min(last, layer + neighbours)
        self.window = encoder.layer_columns(self.first, self.last)
        base = synthesis(encoder, layer, self.first, self.last)
        self.base, self.means = base, producer_means(encoder, layer)
        inputs, outputs = base.shape
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.full = rank is None
        if rank is None:
            self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        else:
            self.down = nn.Parameter(torch.randn(inputs, rank) / math.sqrt(inputs))
            self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, coefficients: Tensor) -> Tensor:
        """``[T, C] -> [T, 2 kv_dim]``."""
        x = coefficients[:, self.window]
        learned = x @ self.weight if self.full else (x @ self.down) @ self.up
        return x @ self.base + learned + (self.bias + self.means)

    def decoder(self) -> ReuseLayer:
        parts: dict[str, Any] = {n: p.detach().clone() for n, p in self.named_parameters()}
        return ReuseLayer(self.first, self.last, base=True, **parts)

    def rates(self, rate: float) -> Iterator[tuple[Tensor, float]]:
        """Parameters with their learning rates: ``rate`` scaled by the size of what they are added to."""
        yield self.bias, rate * max(self.means.square().mean().sqrt().item(), 1e-2)
        if self.full:
            yield self.weight, rate * max(self.base.square().mean().sqrt().item(), 1e-3)
        else:
            yield self.down, rate / 10
            yield self.up, rate / 3


class StudentDecoder(nn.Module):
    """All layers' maps; layer 0 is native."""

    def __init__(self, encoder: Encoder, layers: int, kv_dim: int, settings: DistillSettings) -> None:
        super().__init__()
        self.encoder, self.kv_dim = encoder, kv_dim
        coded = {s.layer for s in encoder.streams}
        self.of_layer = {
            i: ReuseMap(encoder, i, settings.neighbours, settings.rank, layers - 1)
            for i in range(layers)
            if i in coded
        }
        self.maps = nn.ModuleDict({str(i): learned for i, learned in self.of_layer.items()})
        self.layers = layers

    def forward(self, codes: Tensor, token_ids: Sequence[int], model: LoadedModel) -> tuple[Tensor, Tensor]:
        """Content keys and values, each ``[L, T, kv_dim]``."""
        coefficients = codes.float() * self.encoder.steps
        keys, values = [], []
        for i in range(self.layers):
            if i in self.of_layer:
                kv = self.of_layer[i](coefficients)
                keys.append(kv[:, : self.kv_dim])
                values.append(kv[:, self.kv_dim :])
            else:
                k, v = model.project(i, model.embedding_state(token_ids))
                keys.append(k.float())
                values.append(v.float())
        return torch.stack(keys), torch.stack(values)

    def load(self, decoder: Decoder) -> None:
        """Begin from a decoder that was fitted before.

        Raises:
            CodeEncoderError: to another encoder.
            CorpusError: with other windows or ranks.
        """
        if decoder.encoder_digest != self.encoder.digest:
            raise CodeEncoderError(
                f"decoder fitted to encoder {decoder.encoder_digest}, not {self.encoder.digest}"
            )
        for i, learned in self.of_layer.items():
            held = decoder.layers[i]
            for name, parameter in learned.named_parameters():
                value = getattr(held, name, None)
                if value is None or value.shape != parameter.shape:
                    raise CorpusError(f"layer {i} of the decoder to start from has no {name} of this shape")
                parameter.data.copy_(value)

    def decoder(self) -> Decoder:
        layers: list[LayerDecoder] = [
            self.of_layer[i].decoder() if i in self.of_layer else NativeLayer() for i in range(self.layers)
        ]
        return Decoder(self.encoder, layers, self.kv_dim)


def kl_per_position(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) in nats of ``[T, V]`` logits: ``[T]``."""
    log_p = torch.log_softmax(teacher.float(), -1)
    log_q = torch.log_softmax(student.float(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prefix to be decoded (``ids[:coded]``), the tokens behind it, and each position's weight."""

    ids: list[int]
    coded: int
    weights: Tensor


def lesson_of(example: Prompt, settings: DistillSettings, page: int, rng: random.Random | None) -> Lesson | None:
    """What one example teaches, or None when its prompt is too short for a coded page.

    Without ``rng`` the prefix is as long as serving's; with it, some prefixes are cut earlier.
    """
    coded = coded_tokens(len(example.prompt), page, HELD_BACK)
    if coded == 0:
        return None
    ids = example.prompt + example.answer
    if rng is not None and coded > page and (not example.answer or rng.random() < settings.continuation):
        coded = page * rng.randrange(1, coded // page)
        ids = ids[: coded + settings.window]
        return Lesson(ids, coded, torch.ones(len(ids) - coded))
    weights = torch.ones(len(ids) - coded)
    if example.answer:
        # the position before an answer's token predicts it; the last token predicts nothing that is scored
        weights[len(example.prompt) - 1 - coded : -1] = settings.answer_weight
        weights[-1] = 0.0
    return Lesson(ids, coded, weights)


class Classroom:
    """The frozen pair and the encoder: gives each lesson's KL for a decoder's output."""

    def __init__(self, producer: LoadedModel, specialist: LoadedModel, encoder: Encoder) -> None:
        self.producer, self.specialist, self.encoder = producer, specialist, encoder

    @torch.no_grad()
    def prepare(self, lesson: Lesson) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(codes, teacher logits, the specialist's own sink keys, and values)``."""
        state = capture_all(self.producer, lesson.ids[: lesson.coded], hidden_layers=self.encoder.hidden_layers)
        output = self.specialist.model(
            input_ids=torch.tensor([lesson.ids], device=self.specialist.device),
            use_cache=True,
            logits_to_keep=len(lesson.ids) - lesson.coded,
        )
        sinks = self.specialist.content_of(output.cache, 0, SINK_TOKENS)
        return self.encoder.encode(state), output.logits[0], sinks.keys, sinks.values

    def kl(
        self, lesson: Lesson, decode: Callable[[Tensor, Sequence[int], LoadedModel], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """KL at each position behind the prefix, ``[T - coded]``; differentiable in ``decode``'s output."""
        codes, teacher, sink_keys, sink_values = self.prepare(lesson)
        keys, values = decode(codes, lesson.ids[: lesson.coded], self.specialist)
        keys = torch.cat([sink_keys.float(), keys[:, SINK_TOKENS:]], 1)
        values = torch.cat([sink_values.float(), values[:, SINK_TOKENS:]], 1)
        positions = torch.arange(lesson.coded, len(lesson.ids), device=self.specialist.device)
        cache = self.specialist.cache_from(keys, values, torch.arange(lesson.coded))
        logits = self.specialist.model(
            input_ids=torch.tensor([lesson.ids[lesson.coded :]], device=self.specialist.device),
            cache=cache,
            position_ids=positions[None],
        ).logits[0]
        return kl_per_position(teacher, logits)


def distill(
    producer: LoadedModel,
    specialist: LoadedModel,
    encoder: Encoder,
    examples: Sequence[Prompt],
    settings: DistillSettings,
    checkpoint: Path | None = None,
    start: Decoder | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """Fits a decoder; continues from ``checkpoint`` when that file is there.

    Args:
        start: a decoder to begin from instead of the identity, such as that of the specialist's last version.

    Raises:
        CorpusError: no example's prompt is long enough for one coded page.
    """
    usable = [e for e in examples if coded_tokens(len(e.prompt), encoder.page_size, HELD_BACK)]
    if not usable:
        raise CorpusError(f"every prompt is shorter than one coded page ({encoder.page_size + HELD_BACK} tokens)")
    torch.manual_seed(settings.seed)
    student = StudentDecoder(encoder, specialist.layers, specialist.kv_dim, settings)
    groups = [
        {"params": [parameter], "lr": rate}
        for layer in student.of_layer.values()
        for parameter, rate in layer.rates(settings.rate)
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _cosine(s, settings))
    if start is not None:
        student.load(start)
    begin = 0
    curve: list[float] = []
    if checkpoint is not None and checkpoint.exists():
        begin, curve = load_checkpoint(checkpoint, student, optimizer, schedule, asdict(settings))
    classroom = Classroom(producer, specialist, encoder)
    progress = tqdm(range(begin, settings.steps), initial=begin, total=settings.steps, desc="distil")
    for step in progress:
        rng = random.Random(f"{settings.seed}:{step}")
        total = 0.0
        for index in range(settings.batch):
            example = usable[_order(len(usable), step * settings.batch + index, settings.seed)]
            lesson = lesson_of(example, settings, encoder.page_size, rng)
            assert lesson is not None
            kl = classroom.kl(lesson, student)
            loss = (kl * lesson.weights).sum() / lesson.weights.sum() / settings.batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(total)
        progress.set_postfix(kl=f"{sum(curve[-50:]) / len(curve[-50:]):.4f}")
        if checkpoint is not None and (step + 1) % 50 == 0:
            save_checkpoint(checkpoint, student, optimizer, step + 1, curve, asdict(settings))
    return student.decoder(), {"settings": asdict(settings), "prefixes": len(usable), "loss_curve": curve}


def _cosine(step: int, settings: DistillSettings) -> float:
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - settings.warmup) / max(1, settings.steps - settings.warmup)))


def _order(count: int, position: int, seed: int) -> int:
    """The ``position``-th index of endless reshuffled passes over ``count`` examples."""
    epoch, offset = divmod(position, count)
    return random.Random(f"{seed}:{epoch}").sample(range(count), count)[offset]
