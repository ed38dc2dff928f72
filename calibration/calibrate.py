"""Calibrates a pair: reads a corpus, fits a codec, measures it on held-out documents, writes the artefact.

Both methods are settings of one machinery: ``distilled`` (ours) and ``paper`` (joint factorisation, ridge
encoder, aligner, profiled patch layers; ``paper-reuse`` is the same without patches).
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from calibration.corpus import Example, read_corpus, split_by_document
from calibration.distill import Classroom, DistillSettings, Prompt, distill, lesson_of
from calibration.klt import KltSettings, fit_klt
from calibration.paper import PaperSettings, fit_paper
from scd_core.codec import Decoder, Encoder
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel, load_model
from scd_core.packing import Packer
from scd_core.registry import Registry, SpecialistArtefact
from scd_core.signature import check_pair

Method = Literal["distilled", "paper", "paper-reuse"]


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """What to fit, on how much, and how long prompts may be (longer documents are cut into windows)."""

    method: Method = "distilled"
    held_out: float = 0.125
    seed: int = 0
    max_tokens: int = 1024
    measured: int = 24
    klt: KltSettings = field(default_factory=KltSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    paper: PaperSettings = field(default_factory=PaperSettings)


def prompt_of(model: LoadedModel, example: Example, max_tokens: int) -> Prompt:
    """The specialist's own chat prompt for an example, and the answer with the end of turn.

    A prompt above ``max_tokens`` loses the middle of its document's tokens, never the question.
    """
    tokenizer = model.tokenizer
    if tokenizer.chat_template is None:
        ids = tokenizer(example.user_message)["input_ids"]
    else:
        messages = [{"role": "user", "content": example.user_message}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    if len(ids) > max_tokens:
        tail = max_tokens // 4
        ids = ids[: max_tokens - tail] + ids[-tail:]
    answer: list[int] = []
    if example.answer:
        answer = [*tokenizer(example.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Prompt(list(ids), answer)


def calibrate(
    name: str,
    producer_source: str,
    specialist_source: str,
    corpus: str,
    registry: Registry,
    settings: CalibrationSettings,
    workdir: Path | None = None,
    base: str | None = None,
    start_from: str | None = None,
) -> SpecialistArtefact:
    """Fits and publishes the artefact ``name`` (see :func:`scd_core.registry.Registry.save_specialist`).

    Args:
        corpus: a file (text, JSONL, questions as JSON) or a Hugging Face dataset id.
        workdir: where an interrupted run leaves its state, and from where it goes on.
        base: the model under a LoRA specialist, where its own configuration does not name a reachable one.
        start_from: an artefact of the registry whose decoder distillation begins from.

    Raises:
        CorpusError: unreadable or too small a corpus.
        ModelError: the pair does not fit together, or is not supported.
    """
    examples = read_corpus(corpus)
    fit, held_out = split_by_document(examples, settings.held_out, settings.seed)
    producer = load_model(producer_source)
    specialist = load_model(specialist_source, base=base)
    check_pair(producer.signature, specialist.signature)
    prompts = [prompt_of(specialist, e, settings.max_tokens) for e in fit]
    if settings.method == "distilled":
        encoder = _producer_encoder(registry, producer, prompts, settings.klt)
        fast = _fast_dtype()
        decoder, report = distill(
            load_model(producer_source, dtype=fast),
            load_model(specialist_source, dtype=fast, base=base),
            encoder,
            prompts,
            settings.distill,
            workdir / f"{name}.{specialist.signature.fingerprint[:8]}.distill.safetensors" if workdir else None,
            registry.load_specialist(start_from).decoder if start_from else None,
        )
    else:
        paper = settings.paper if settings.method == "paper" else settings.paper.without_patches()
        encoder, decoder, report = fit_paper(producer, specialist, prompts, paper, workdir)
    measured = measure(producer, specialist, encoder, decoder, held_out, settings)
    artefact = SpecialistArtefact(
        name=name,
        producer_source=producer_source,
        specialist_source=specialist_source,
        producer=producer.signature,
        specialist=specialist.signature,
        encoder=encoder,
        decoder=decoder,
        provenance={
            "method": settings.method,
            "settings": asdict(settings),
            "corpus": Path(corpus).name,
            "start_from": start_from,
            "documents": {"fit": len(fit), "held_out": len(held_out)},
            "seen": sorted({e.fingerprint for e in fit}),
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
        report={**report, "held_out": measured},
    )
    registry.save_specialist(artefact)
    return artefact


def _producer_encoder(
    registry: Registry, producer: LoadedModel, prompts: Sequence[Prompt], settings: KltSettings
) -> Encoder:
    """The registry's encoder of this producer and these settings, fitted once and shared by all specialists."""
    origin = {"producer": producer.signature.fingerprint, "klt": asdict(settings)}
    for digest in registry.encoders():
        if registry.encoder_provenance(digest) == origin:
            return registry.load_encoder(digest)
    encoder = fit_klt(producer, [p.prompt for p in prompts], settings)
    registry.save_encoder(encoder, origin)
    return encoder


def _fast_dtype() -> torch.dtype:
    fast = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


@torch.no_grad()
def measure(
    producer: LoadedModel,
    specialist: LoadedModel,
    encoder: Encoder,
    decoder: Decoder,
    held_out: Sequence[Example],
    settings: CalibrationSettings,
) -> dict[str, Any]:
    """KL behind the prefix (median and mean over documents) and bytes per coded token, on held-out examples.

    Raises:
        CorpusError: no held-out prompt is long enough for a coded page.
    """
    classroom = Classroom(producer, specialist, encoder)
    packer = Packer.of(encoder)
    kls: list[float] = []
    sizes: list[float] = []

    def decode(codes: torch.Tensor, ids: Sequence[int], model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
        pages = codes.split(encoder.page_size)
        sizes.append(sum(len(packer.pack(page)) for page in pages) / codes.shape[0])
        content = decoder.decode(codes, ids, model)
        return content.keys, content.values

    for example in tqdm(held_out[: settings.measured], desc="measure held-out"):
        lesson = lesson_of(
            prompt_of(specialist, example, settings.max_tokens), settings.distill, encoder.page_size, None
        )
        if lesson is not None:
            kls.append(float(classroom.kl(lesson, decode).mean()))
    if not kls:
        raise CorpusError("no held-out prompt is long enough for one coded page: add longer documents")
    raw = 2 * specialist.layers * specialist.kv_dim * 2
    return {
        "prefixes": len(kls),
        "kl_median": statistics.median(kls),
        "kl_mean": statistics.fmean(kls),
        "bytes_per_token": statistics.fmean(sizes),
        "bytes_ratio": statistics.fmean(sizes) / raw,
    }
