"""The Pareto plot of an evaluation: F1 against bytes, and against the time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from calibration.report import Row


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points ``(cost, quality)`` that no other beats in both, by rising cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def plot_pareto(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws the rows that have an F1 into an image; the line joins those that none beats."""
    shown = [r for r in rows if r.f1 is not None]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    panels = (
        (axes[0], [r.bytes_ratio for r in shown], "bytes per token, of raw bfloat16"),
        (axes[1], [r.ttft_s * 1e3 for r in shown], "time to first token, ms (median, specialist's side)"),
    )
    for axis, costs, label in panels:
        points = [(cost, r.f1 or 0.0) for cost, r in zip(costs, shown, strict=True)]
        front = pareto_front(points)
        axis.plot([points[i][0] for i in front], [points[i][1] for i in front], "-", color="0.75", zorder=1)
        for (x, y), row in zip(points, shown, strict=True):
            ours = row.method == "scd"
            axis.scatter([x], [y], s=70 if ours else 35, color="tab:red" if ours else "tab:blue", zorder=2)
            axis.annotate(row.method, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
        axis.set_xlabel(label)
        axis.set_xlim(left=min(0.0, *costs) if costs else 0.0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("F1")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
