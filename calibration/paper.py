"""The method of the SCD paper (Ma et al., ICML 2026, arXiv 2606.07684), as settings of this project's codec.

REUSE by joint factorisation with a ridge encoder, PATCH by an MLP aligner over a code of the hidden input, patch
layers by profiling; codes are bfloat16, not quantised. Sinks and the held-back tail are native, as in all that
this codec serves: a courtesy to the method, which loses much more without (see :mod:`scd_core.encoder`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from calibration.aligner import AlignerSettings, fit_aligners
from calibration.assembly import Streams, assemble, decoder_of, encoder_of, factorise_all, linear_patch
from calibration.distill import DistillSettings, Lesson, Prompt, lesson_of
from calibration.moments import StateMoments
from calibration.profile import Size, profile_patches, rank_layers
from calibration.rehearse import Rehearsal
from scd_core.codec import Decoder, Encoder, Kind
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel
from scd_core.pages import PAGE


@dataclass(frozen=True, slots=True)
class PaperSettings:
    """What the method leaves open.

    Ranks of keys, values and hidden inputs; None: a third and a half of ``kv_dim``, half of ``hidden_size`` (keys
    stand a lower rank than values). ``patch`` names the patched layers, or has them profiled: all layers with
    linear aligners, then the best ``candidates`` with trained ones, of which at most ``most_patches`` are taken.
    """

    rank_k: int | None = None
    rank_v: int | None = None
    rank_h: int | None = None
    patch: Literal["auto"] | tuple[int, ...] = "auto"
    candidates: int = 10
    most_patches: int = 8
    profile_prefixes: int = 8
    ridge: float = 1e-4
    tokens: int = 24_000
    aligner_width: int = 256
    aligner_steps: int = 240
    aligner_tokens: int = 8_192
    aligner_metric: Literal["hidden", "kv"] = "hidden"
    seed: int = 0

    def __post_init__(self) -> None:
        positive = (self.candidates, self.most_patches, self.profile_prefixes, self.tokens, self.aligner_tokens)
        ranks = [rank for rank in (self.rank_k, self.rank_v, self.rank_h) if rank is not None]
        if min(*positive, *ranks) < 1 or min(self.ridge, self.aligner_width, self.aligner_steps) < 0:
            raise ValueError(f"ranks and counts must be positive, ridge and width at least 0: {self}")

    def without_patches(self) -> PaperSettings:
        """REUSE only."""
        return replace(self, patch=())

    def aligner(self) -> AlignerSettings:
        """Training of the aligners."""
        return AlignerSettings(
            width=self.aligner_width, steps=self.aligner_steps, metric=self.aligner_metric, seed=self.seed
        )

    def ranks(self, model: LoadedModel) -> dict[Kind, int]:
        """Rank of each kind of stream, bounded by its dimension."""
        kv, hidden = model.kv_dim, model.hidden_size
        wanted: dict[Kind, tuple[int | None, int, int]] = {
            "k": (self.rank_k, max(1, kv // 3), kv),
            "v": (self.rank_v, max(1, kv // 2), kv),
            "h": (self.rank_h, max(1, hidden // 2), hidden),
        }
        return {kind: min(default if rank is None else rank, d) for kind, (rank, default, d) in wanted.items()}


def fit_paper(
    producer: LoadedModel,
    specialist: LoadedModel,
    examples: Sequence[Prompt],
    settings: PaperSettings,
    workdir: Path | None = None,
) -> tuple[Encoder, Decoder, dict[str, Any]]:
    """Fits the method to a pair of models.

    Args:
        workdir: where moments and aligners are kept as they come, so that a run that was killed goes on.

    Returns:
        Encoder, decoder, and a report: settings, ranks, bytes, errors per stream, aligners, and the profile.

    Raises:
        CorpusError: no prompt is long enough to fit on, or to profile on.
        ValueError: a layer named in ``settings.patch`` does not exist.
    """
    if settings.patch != "auto" and not set(settings.patch) <= set(range(specialist.layers)):
        raise ValueError(f"patch layers {settings.patch} of a model of {specialist.layers} layers")
    wanted = tuple(range(specialist.layers)) if settings.patch == "auto" else tuple(sorted(set(settings.patch)))
    fit, lessons = _split(examples, settings)
    folder = workdir / f"paper-{_run_key(producer, specialist, examples, settings)}" if workdir else None
    moments = gather(producer, specialist, fit, wanted, settings.tokens, folder)
    factors = factorise_all(moments, settings.ranks(producer), settings.ridge)
    report: dict[str, Any] = {
        "settings": asdict(settings),
        "ranks": settings.ranks(producer),
        "prompts": moments.prompts,
        "lost_variance": {f"{layer}.{kind}": f.error for (layer, kind), f in factors.items()},
    }
    rehearsal = None
    size = _size(factors, specialist.layers)
    if settings.patch == "auto":
        rehearsal = _rehearsal(producer, specialist, factors, lessons)
        ranking, gains = rank_layers(rehearsal.quality, size, wanted, "profile layers (linear)")
        report["linear_gains"] = {str(layer): gain for layer, gain in sorted(gains.items())}
        wanted = tuple(sorted(ranking[: settings.candidates]))
    patches, report["aligners"] = fit_aligners(
        producer,
        specialist,
        encoder_of(factors, [(layer, "h") for layer in wanted]),
        {layer: linear_patch(factors, layer) for layer in wanted},
        fit,
        settings.aligner(),
        settings.aligner_tokens,
        folder,
    )
    chosen = wanted
    if rehearsal is not None:
        rehearsal.patch(decoder_of(rehearsal.encoder, factors, patches, specialist.layers))
        profile = profile_patches(rehearsal.quality, size, wanted, settings.most_patches, progress=True)
        report["profile"], chosen = profile.report(), profile.chosen
    encoder, decoder = assemble(factors, {layer: patches[layer] for layer in chosen}, specialist.layers)
    report |= {"patch": list(chosen), "bytes_per_token": 2 * encoder.columns}
    return encoder, decoder, report


def gather(
    producer: LoadedModel,
    specialist: LoadedModel,
    prompts: Sequence[Sequence[int]],
    hidden_layers: Sequence[int],
    tokens: int,
    folder: Path | None = None,
) -> StateMoments:
    """Moments of about ``tokens`` tokens of the prompts; goes on from ``folder``'s when it holds some."""
    moments = StateMoments(producer, specialist, hidden_layers)
    path = folder / "moments.safetensors" if folder else None
    if path is not None and path.exists():
        moments.load(path)
    unsaved = 0
    with tqdm(total=tokens, initial=moments.pairs["k"].count, desc="moments", unit="token") as progress:
        for ids in prompts[moments.prompts :]:
            before = moments.pairs["k"].count
            if before >= tokens:
                break
            moments.update(producer, specialist, ids)
            progress.update(moments.pairs["k"].count - before)
            unsaved += 1
            if path is not None and unsaved == 16:
                moments.save(path)
                unsaved = 0
    if path is not None and unsaved:
        moments.save(path)
    return moments


def _split(examples: Sequence[Prompt], settings: PaperSettings) -> tuple[list[list[int]], list[Lesson]]:
    """Prompts to fit on, and the lessons to profile on: others, where there are enough.

    Raises:
        CorpusError: patch layers are to be profiled, and no prompt is long enough for a coded page.
    """
    prompts = [example.prompt for example in examples]
    if settings.patch != "auto":
        return prompts, []
    scored = {i: lesson_of(example, DistillSettings(), PAGE, None) for i, example in enumerate(examples)}
    lessons = {i: lesson for i, lesson in scored.items() if lesson is not None and float(lesson.weights.sum()) > 0}
    if not lessons:
        raise CorpusError("no prompt is long enough for one coded page: nothing to profile patch layers on")
    count = min(settings.profile_prefixes, max(1, len(lessons) // 4))
    taken = set(random.Random(settings.seed).sample(sorted(lessons), count))
    rest = [ids for i, ids in enumerate(prompts) if i not in taken]
    return rest or prompts, [lessons[i] for i in sorted(taken)]


def _rehearsal(
    producer: LoadedModel, specialist: LoadedModel, factors: Streams, lessons: Sequence[Lesson]
) -> Rehearsal:
    """All layers reused, against all layers patched by their linear aligners."""
    layers = specialist.layers
    rehearsal = Rehearsal(producer, specialist, encoder_of(factors, list(factors)), lessons)
    rehearsal.reuse(decoder_of(rehearsal.encoder, factors, {}, layers))
    linear = {layer: linear_patch(factors, layer) for layer in range(layers)}
    rehearsal.patch(decoder_of(rehearsal.encoder, factors, linear, layers))
    return rehearsal


def _size(factors: Streams, layers: int) -> Size:
    """Bytes of bfloat16 codes per token."""

    def size(patched: frozenset[int]) -> float:
        kinds: dict[bool, tuple[Kind, ...]] = {True: ("h",), False: ("k", "v")}
        return 2.0 * sum(factors[i, kind].rank for i in range(layers) for kind in kinds[i in patched])

    return size


def _run_key(
    producer: LoadedModel, specialist: LoadedModel, examples: Sequence[Prompt], settings: PaperSettings
) -> str:
    """Names a run by all that its result depends on, so that it only ever continues itself."""
    models = [model.signature.fingerprint for model in (producer, specialist)]
    run = [models, asdict(settings), [[example.prompt, example.answer] for example in examples]]
    return hashlib.blake2b(json.dumps(run).encode(), digest_size=8).hexdigest()
