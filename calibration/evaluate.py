"""The paper's table for one pair on data that calibration never saw.

Every question is run once by the specialist alone (the oracle) and once per method on the same producer state;
every window of a text likewise, for perplexity. Methods whose artefact the registry lacks are left out by name.
"""

from __future__ import annotations

import random
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from calibration.calibrate import prompt_of
from calibration.corpus import Example, read_corpus, text_documents
from calibration.methods import Coded
from calibration.pair import MAX_NEW, Pair, Task
from calibration.plots import plot_pareto
from calibration.report import (
    EQUAL_BYTES,
    METHODS,
    Answered,
    Row,
    Scored,
    json_line,
    make_row,
    markdown,
    write_table,
)
from scd_core.codec import HELD_BACK
from scd_core.errors import ArtefactError, CorpusError
from scd_core.huggingface import LoadedModel, load_model
from scd_core.pages import coded_tokens
from scd_core.registry import Registry, SpecialistArtefact

PREFIX, BEHIND = 256, 128
"""A window of a text: so many tokens handed over, so many behind them run natively and scored."""

PROFILED = 4
PAPER = {
    "scd_paper_reuse": ("--paper-reuse", "paper-reuse"),
    "scd_paper": ("--paper", "paper"),
    EQUAL_BYTES: ("--paper-equal", "paper-reuse"),
}
_NO_LIMIT = 1 << 40


def evaluate(
    name: str,
    registry: Registry | Path,
    questions: Path | None,
    text: Path | None,
    limit: int | None,
    out: Path,
    seed: int = 0,
    *,
    windows: int = 40,
    command: str | None = None,
    producer_source: str | None = None,
    specialist_source: str | None = None,
    base: str | None = None,
) -> list[Row]:
    """Measures the pair of the artefact ``name`` and writes the table, the measurements and the plot to ``out``.

    Args:
        questions: documents with questions, in any form of :mod:`calibration.corpus`; gives F1, KL and the rest.
        text: plain text for perplexity (and for the rest but F1, where there are no questions).
        limit: at most so many questions, drawn by ``seed``.
        windows: at most so many windows of ``text``.
        command: what the measurements are signed with; the process's own command line unless given.
        producer_source, specialist_source: where the models are now, if not where they were calibrated.
        base: the model under a LoRA specialist; the producer unless given.

    Raises:
        CorpusError: neither questions nor text, or nothing in them that can be measured.
        ArtefactError: no such artefact, or the models are not those it was calibrated for.
    """
    if questions is None and text is None:
        raise CorpusError("nothing to evaluate on: give questions, or a text for perplexity, or both")
    registry = registry if isinstance(registry, Registry) else Registry(registry)
    artefact = registry.load_specialist(name)
    producer_at = producer_source or artefact.producer_source
    producer = load_model(producer_at, dtype=torch.float32)
    specialist = load_model(
        specialist_source or artefact.specialist_source, dtype=torch.float32, base=base or producer_at
    )
    artefact.verify(producer, specialist)
    pair = Pair(producer, specialist, _codecs(name, registry, artefact, specialist))
    page = artefact.encoder.page_size
    seen = set(artefact.provenance.get("seen", ()))
    asked, fit, notes = _question_tasks(specialist, questions, seen, limit, seed, page)
    cut = _window_tasks(specialist, text, windows, seed, page)
    if not asked and not cut:
        raise CorpusError("no question and no window of the text is long enough for a coded page, and unseen")
    critical = pair.prepare((fit or cut or asked)[:PROFILED])
    notes += [
        f"pair: {artefact.producer_source} -> {artefact.specialist_source}; {len(asked)} questions, "
        f"{len(cut)} windows of {PREFIX} + {BEHIND} tokens; seed {seed}",
        f"droidspeak recomputes layers {critical[0]} to {critical[1] - 1}",
        f"raw is {pair.raw_bytes_per_token:,} bytes per token (bfloat16)",
    ]
    out.mkdir(parents=True, exist_ok=True)
    rows = _measure(pair, asked, cut, out, seed, command or shlex.join(sys.argv))
    write_table(out, rows, notes)
    if asked:
        plot_pareto(rows, out / "pareto.png", f"{name}: {len(asked)} held-out questions")
    print(markdown(rows, notes))
    return rows


def _codecs(name: str, registry: Registry, artefact: SpecialistArtefact, specialist: LoadedModel) -> list[Coded]:
    """The paper's codecs, where the registry has them, and the artefact's own."""
    found = []
    for method, (suffix, setting) in PAPER.items():
        if name + suffix not in registry.list():
            if method == EQUAL_BYTES:
                continue
            print(
                f"{method} is left out: the registry has no {name}{suffix}. To make it: scd calibrate "
                f"--producer {artefact.producer_source} --specialist {artefact.specialist_source} "
                f"--corpus CORPUS --method {setting} --name {name}{suffix} --out {registry.root}"
            )
            continue
        other = registry.load_specialist(name + suffix)
        if (other.producer, other.specialist) != (artefact.producer, artefact.specialist):
            raise ArtefactError(f"{name}{suffix} was calibrated for another pair than {name}")
        if other.encoder.page_size != artefact.encoder.page_size:
            raise ArtefactError(f"{name}{suffix} codes pages of another size than {name}")
        found.append(Coded(method, other.encoder, other.decoder, specialist))
    return [*found, Coded("scd", artefact.encoder, artefact.decoder, specialist)]


def _question_tasks(
    specialist: LoadedModel, path: Path | None, seen: set[str], limit: int | None, seed: int, page: int
) -> tuple[list[Task], list[Task], list[str]]:
    """``(to measure, to profile on, notes)``; what calibration saw is only profiled on."""
    if path is None:
        return [], [], []
    examples = [e for e in read_corpus(path) if e.answer is not None]
    unseen = [e for e in examples if e.fingerprint not in seen]
    notes = []
    if len(unseen) < len(examples):
        notes.append(f"left out {len(examples) - len(unseen)} question(s) about documents that calibration saw")
        print(notes[-1])
    rng = random.Random(seed)
    order = rng.sample(range(len(unseen)), len(unseen))
    chosen: list[Task] = []
    spare = [e for e in examples if e.fingerprint in seen]
    short = 0
    for position, index in enumerate(order):
        if limit is not None and len(chosen) >= limit:
            spare += [unseen[i] for i in order[position:]]
            break
        task = _task(specialist, unseen[index], page)
        if task is None:
            short += 1
        else:
            chosen.append(task)
    if short:
        notes.append(
            f"left out {short} question(s) whose prompt holds no full page to code, or does not fit the model"
        )
        print(notes[-1])
    documents = {t.example.fingerprint for t in chosen if t.example}
    apart = [e for e in spare if e.fingerprint not in documents]
    rng.shuffle(apart)
    fit = [t for e in apart[: 4 * PROFILED] if (t := _task(specialist, e, page)) is not None]
    return chosen, fit, notes


def _task(specialist: LoadedModel, example: Example, page: int) -> Task | None:
    ids = prompt_of(specialist, example, _NO_LIMIT).prompt
    coded = coded_tokens(len(ids), page, HELD_BACK)
    return Task(ids, coded, example) if coded and len(ids) + MAX_NEW <= specialist.max_positions else None


def _window_tasks(specialist: LoadedModel, path: Path | None, windows: int, seed: int, page: int) -> list[Task]:
    """Windows of the documents' tokens, drawn by ``seed``; a document's last, partial one is not used."""
    if path is None:
        return []
    coded = PREFIX // page * page
    size = coded + BEHIND + 1
    found = []
    for _, document in text_documents(path):
        ids = specialist.tokenizer(document)["input_ids"]
        found += [Task(ids[i : i + size], coded) for i in range(0, len(ids) - size + 1, size)]
    random.Random(seed).shuffle(found)
    return found[:windows]


def _measure(
    pair: Pair, asked: Sequence[Task], cut: Sequence[Task], out: Path, seed: int, command: str
) -> list[Row]:
    answered: dict[str, list[Answered]] = defaultdict(list)
    scored: dict[str, list[Scored]] = defaultdict(list)
    with ExitStack() as stack:

        def lines(name: str) -> TextIO:
            return stack.enter_context((out / name).open("w", encoding="utf-8"))

        if asked:
            file = lines("questions.jsonl")
            _warm_up(pair.answered(asked[0], asked[0].example or Example("")))
            for task in tqdm(asked, desc="questions"):
                for a in pair.answered(task, task.example or Example("")):
                    answered[a.method].append(a)
                    file.write(json_line(a, seed, command))
        if cut:
            file = lines("windows.jsonl")
            _warm_up(pair.scored(0, cut[0], compared=not asked))
            for number, task in enumerate(tqdm(cut, desc="windows")):
                for s in pair.scored(number, task, compared=not asked):
                    scored[s.method].append(s)
                    file.write(json_line(s, seed, command))
    raw = pair.raw_bytes_per_token
    present = [m for m in (*METHODS, EQUAL_BYTES) if m in answered or m in scored]
    return [make_row(m, answered[m], scored[m], raw, seed) for m in present]


def _warm_up(runs: Iterator[Answered] | Iterator[Scored]) -> None:
    """A first run builds what later ones reuse (decoders' folded maps, kernels), and is not measured."""
    for _ in runs:
        pass
