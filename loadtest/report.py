"""Medians, spread and ratios of the measured requests: a table, CSV files and a plot."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.client import Reply

Row = tuple[int, str, int, Reply]  # length asked for, condition, round, reply


@dataclass(frozen=True, slots=True)
class Summary:
    """One length under one condition. Times in milliseconds; ``low`` and ``high`` are the extremes."""

    length: int
    condition: str
    requests: int
    prompt_tokens: float
    ttft_ms: float
    low_ms: float
    high_ms: float
    speedup: float  # median over rounds of native / this; 1 for native itself
    speedup_low: float
    speedup_high: float
    from_codes: float
    kilobytes: float


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """One summary per length and condition, in the order in which they first appear by length."""
    native = {(length, turn): reply.ttft_s for length, condition, turn, reply in rows if condition == "native"}
    found = []
    for length in sorted({row[0] for row in rows}):
        for condition in sorted({row[1] for row in rows}, key=["native", "warm", "cold"].index):
            replies = {turn: reply for at, name, turn, reply in rows if (at, name) == (length, condition)}
            times = [reply.ttft_s * 1000 for reply in replies.values()]
            ratios = [native[length, turn] / reply.ttft_s for turn, reply in replies.items()]
            found.append(
                Summary(
                    length=length,
                    condition=condition,
                    requests=len(times),
                    prompt_tokens=statistics.median(r.prompt_tokens for r in replies.values()),
                    ttft_ms=statistics.median(times),
                    low_ms=min(times),
                    high_ms=max(times),
                    speedup=statistics.median(ratios),
                    speedup_low=min(ratios),
                    speedup_high=max(ratios),
                    from_codes=statistics.median(r.from_codes for r in replies.values()),
                    kilobytes=statistics.median(r.bytes_moved for r in replies.values()) / 1000,
                )
            )
    return found


def table(rows: Sequence[Row]) -> str:
    """The summaries as Markdown."""
    lines = [
        "| prompt tokens | condition | TTFT ms (extremes) | speed-up (extremes) | tokens from codes | kB moved |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(s) for s in summarise(rows)])


def _line(s: Summary) -> str:
    return (
        f"| {s.prompt_tokens:.0f} | {s.condition} | {s.ttft_ms:.0f} ({s.low_ms:.0f} to {s.high_ms:.0f}) "
        f"| {s.speedup:.2f}x ({s.speedup_low:.2f} to {s.speedup_high:.2f}) "
        f"| {s.from_codes:.0f} | {s.kilobytes:.0f} |"
    )


def save(rows: Sequence[Row], out: Path) -> None:
    """``requests.csv``, ``summary.csv``, ``summary.md`` and ``ttft.png`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    requests = [
        {"length": length, "condition": condition, "round": turn, **asdict(reply)}
        for length, condition, turn, reply in rows
    ]
    summaries = [asdict(summary) for summary in summarise(rows)]
    for name, records in (("requests.csv", requests), ("summary.csv", summaries)):
        with (out / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    (out / "summary.md").write_text(table(rows) + "\n", encoding="utf-8")
    _plot(summarise(rows), out / "ttft.png")


def _plot(summaries: Sequence[Summary], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for condition, label in (
        ("native", "specialist's own prefill"),
        ("cold", "codes, producer cold"),
        ("warm", "codes, producer warm"),
    ):
        mine = [s for s in summaries if s.condition == condition]
        below = [s.ttft_ms - s.low_ms for s in mine]
        above = [s.high_ms - s.ttft_ms for s in mine]
        axes.errorbar(
            [s.prompt_tokens for s in mine],
            [s.ttft_ms for s in mine],
            [below, above],
            marker="o",
            capsize=3,
            label=label,
        )
        if condition == "warm":
            for s in mine:
                axes.annotate(
                    f"{s.speedup:.1f}x",
                    (s.prompt_tokens, s.ttft_ms),
                    xytext=(0, -14),
                    textcoords="offset points",
                    ha="center",
                )
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="time to first token, ms")
    ticks = sorted({s.length for s in summaries})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
