"""The table of an evaluation: its rows from what was measured, and the files that hold them.

``DIR/table.csv`` has the columns of :data:`COLUMNS`; ``table.md`` adds spreads; ``questions.jsonl`` and
``windows.jsonl`` hold every single measurement, with the seed and the command that made it.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calibration.metrics import bootstrap_interval, perplexity

COLUMNS = ("method", "bytes_per_token", "bytes_ratio", "ttft_s", "f1", "kl", "agreement", "ppl")
METHODS = (
    "oracle",
    "raw",
    "raw_rerotated",
    "int4",
    "int4_rerotated",
    "droidspeak",
    "scd_paper_reuse",
    "scd_paper",
    "scd",
)
EQUAL_BYTES = "scd_paper_equal"
"""A row behind the table: the paper's method at ranks that cost what ``scd`` costs, where it was calibrated."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One method's answer to one question; ``kl`` and ``agreement`` per token of the oracle's answer."""

    method: str
    document: str
    question: str
    references: tuple[str, ...]
    answer: str
    f1: float
    exact: float
    kl: list[float]
    agreement: list[float]
    ttft_s: float
    nbytes: int
    prompt_tokens: int
    coded_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """One method's logits behind one window's prefix; lists per scored token.

    ``kl`` and ``agreement`` are empty where questions measure them; ``ttft_s`` is the time to all these logits.
    """

    method: str
    window: int
    nll: list[float]
    kl: list[float]
    agreement: list[float]
    ttft_s: float
    nbytes: int
    coded_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One method's line of the table; None where nothing was measured. ``ttft_s`` is the median."""

    method: str
    bytes_per_token: float
    bytes_ratio: float
    ttft_s: float
    f1: float | None
    kl: float
    agreement: float
    ppl: float | None
    spread: dict[str, Any] = field(default_factory=dict)


def make_row(
    method: str, answered: Sequence[Answered], scored: Sequence[Scored], raw_bytes_per_token: int, seed: int
) -> Row:
    """The line of ``method``: from its answers, and from its windows what the answers do not give.

    Means over tokens, except F1 (over questions) and the time to first token (median over questions).
    """
    measured: Sequence[Answered | Scored] = answered or scored
    per_token = sum(m.nbytes for m in measured) / sum(m.coded_tokens for m in measured)
    kl = [x for m in measured for x in m.kl]
    f1 = [a.f1 for a in answered]
    times = sorted(m.ttft_s for m in measured)
    spread: dict[str, Any] = {
        "questions": len(answered),
        "windows": len(scored),
        "ttft_iqr": (times[len(times) // 4], times[(3 * len(times)) // 4]),
        "kl_median": statistics.median(kl),
    }
    if answered:
        spread["f1_ci"] = bootstrap_interval(f1, seed)
        spread["exact"] = statistics.fmean(a.exact for a in answered)
    return Row(
        method,
        per_token,
        per_token / raw_bytes_per_token,
        statistics.median(times),
        statistics.fmean(f1) if f1 else None,
        statistics.fmean(kl),
        statistics.fmean(x for m in measured for x in m.agreement),
        perplexity([x for s in scored for x in s.nll]) if scored else None,
        spread,
    )


def write_table(out: Path, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Writes ``table.csv`` and ``table.md``; ``notes`` stand under the latter."""
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(["" if (v := getattr(row, c)) is None else _plain(v) for c in COLUMNS])
    (out / "table.md").write_text(markdown(rows, notes), encoding="utf-8")


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table with spreads: F1 with its 95 % interval, the quartiles of the time to first token."""
    head = [
        "method", "bytes/token", "of raw", "TTFT ms (quartiles)", "speed-up", "F1 (95 %)", "of oracle", "EM",
        "KL (median)", "agreement", "PPL",
    ]  # fmt: skip
    oracle = next((r for r in rows if r.method == "oracle"), None)
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for r in rows:
        low, high = r.spread["ttft_iqr"]
        f1 = of_oracle = exact = ""
        if r.f1 is not None:
            f1 = f"{r.f1:.4f} ({r.spread['f1_ci'][0]:.3f}-{r.spread['f1_ci'][1]:.3f})"
            exact = f"{r.spread['exact']:.3f}"
            of_oracle = f"{r.f1 / oracle.f1:.1%}" if oracle is not None and oracle.f1 else ""
        cells = [
            r.method,
            f"{r.bytes_per_token:,.0f}",
            f"{r.bytes_ratio:.4f}",
            f"{r.ttft_s * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})",
            f"{oracle.ttft_s / r.ttft_s:.2f}x" if oracle is not None else "",
            f1,
            of_oracle,
            exact,
            f"{r.kl:.4f} ({r.spread['kl_median']:.4f})",
            f"{r.agreement:.3f}",
            "" if r.ppl is None else f"{r.ppl:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def json_line(record: Answered | Scored, seed: int, command: str) -> str:
    """One line of JSONL."""
    return json.dumps({**_rounded(asdict(record)), "seed": seed, "command": command}, ensure_ascii=False) + "\n"


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _rounded(value: Any) -> Any:
    """Six significant digits; JSON has no infinity, and gets null for it."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
