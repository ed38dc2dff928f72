"""The table's figures from measurements small enough to work out by hand."""

import csv
import json
import math

import pytest

from calibration.plots import pareto_front, plot_pareto
from calibration.report import COLUMNS, Answered, Scored, json_line, make_row, markdown, write_table

RAW = 100


def answer(f1: float, kl: list[float], ttft: float, nbytes: int, coded: int, method: str = "scd") -> Answered:
    ones = [1.0] * len(kl)
    return Answered(method, "fp", "q", ("r",), "a", f1, 0.0, kl, ones, ttft, nbytes, coded + 20, coded)


def score(nll: list[float], kl: list[float], method: str = "scd") -> Scored:
    return Scored(method, 0, nll, kl, [0.0] * len(kl), 3.0, 640, 32)


def test_bytes_and_kl_are_per_token_not_per_question():
    """A mean of per-question means would give 15 bytes and KL 0.35."""
    rows = [answer(1.0, [0.1, 0.1, 0.1], 0.2, 320, 32), answer(0.5, [0.6], 0.4, 1280, 64)]
    row = make_row("scd", rows, [], RAW, seed=0)
    assert row.bytes_per_token == pytest.approx(1600 / 96)
    assert row.bytes_ratio == pytest.approx(1600 / 96 / RAW)
    assert row.kl == pytest.approx(0.9 / 4)
    assert row.f1 == 0.75
    assert row.agreement == 1.0
    assert row.ppl is None


def test_time_to_first_token_is_a_median():
    """One slow run must not move it: the mean would be above 30."""
    rows = [answer(1.0, [0.0], t, 32, 32) for t in (0.2, 0.3, 99.0)]
    assert make_row("scd", rows, [], RAW, seed=0).ttft_s == 0.3


def test_windows_give_perplexity_and_questions_the_rest():
    row = make_row("scd", [answer(1.0, [0.1], 0.2, 320, 32)], [score([math.log(4), math.log(2)], [])], RAW, seed=0)
    assert row.ppl == pytest.approx(8**0.5)
    assert (row.ttft_s, row.bytes_per_token, row.kl) == (0.2, 10, pytest.approx(0.1))


def test_windows_alone_give_all_but_f1():
    row = make_row("scd", [], [score([0.0], [0.4, 0.2])], RAW, seed=0)
    assert (row.f1, row.ppl, row.bytes_per_token, row.ttft_s) == (None, 1.0, 20, 3.0)
    assert row.kl == pytest.approx(0.3)


def test_the_files_keep_to_the_contract(tmp_path):
    oracle = make_row("oracle", [answer(0.8, [0.0], 0.4, 0, 32, "oracle")], [], RAW, seed=0)
    scd = make_row("scd", [answer(0.4, [0.25], 0.1, 512, 32)], [], RAW, seed=0)
    write_table(tmp_path, [oracle, scd], ["a note"])
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert COLUMNS == ("method", "bytes_per_token", "bytes_ratio", "ttft_s", "f1", "kl", "agreement", "ppl")
    assert rows[0] == {
        "method": "oracle", "bytes_per_token": "0", "bytes_ratio": "0", "ttft_s": "0.4", "f1": "0.8", "kl": "0",
        "agreement": "1", "ppl": "",
    }  # fmt: skip
    assert rows[1]["bytes_ratio"] == "0.16"
    table = (tmp_path / "table.md").read_text()
    assert "| scd | 16 | 0.1600 | 100 (100-100) | 4.00x | 0.4000 (0.400-0.400) | 50.0% |" in table
    assert "- a note" in table


def test_the_table_stands_without_an_oracle_or_questions():
    assert "| scd |" in markdown([make_row("scd", [], [score([0.0], [0.1])], RAW, seed=0)], [])


def test_a_measurement_is_one_line_with_seed_and_command():
    line = json_line(answer(1.0, [0.1234567891, math.inf], 0.2, 320, 32), 7, "scd evaluate x")
    assert line.count("\n") == 1
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["seed"], record["command"], record["kl"]) == (7, "scd evaluate x", [0.123457, None])


def test_the_front_holds_exactly_what_nothing_beats():
    points = [(1.0, 0.5), (0.2, 0.4), (0.3, 0.4), (0.2, 0.1), (2.0, 0.9), (3.0, 0.9)]
    front = pareto_front(points)
    assert front == [1, 0, 4]
    for i, (cost, quality) in enumerate(points):
        beaten = any(c <= cost and q >= quality and (c, q) != (cost, quality) for c, q in points)
        assert beaten == (i not in front)


def test_the_plot_is_an_image(tmp_path):
    rows = [
        make_row(m, [answer(f, [0.1], 0.2, b, 32, m)], [], RAW, seed=0)
        for m, f, b in (("raw", 0.4, 900), ("scd", 0.8, 90))
    ]
    plot_pareto(rows, tmp_path / "p.png", "two methods")
    data = (tmp_path / "p.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000
