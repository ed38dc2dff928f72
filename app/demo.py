"""``scd demo``: two specialists of one base model on this machine, one document, and what the codes save.

Every specialist answers twice: wholly by itself, and over codes. The document is prefilled by the producer once,
for whoever asks first.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.client import Answer, Client
from app.serve import Say, running_pool
from deployments.config import PoolSettings, SpecialistSettings
from scd_core.errors import PoolError
from scd_core.home import home

DOCUMENT = """\
Saint Brannock Lighthouse stands on the northern tip of Lundmore Island, 14 miles off the coast of Kerry. \
Work on the tower began in 1847 under the engineer Thomas Halloran, after the barque Elizabeth Ann had been \
wrecked on the reef below the cliffs with the loss of 23 lives. Granite was quarried on the island itself \
and carried to the site on a tramway that the builders laid along the western shore. The light was first \
shown on 3 October 1851. The tower is 112 feet high, and its lamp could be seen at a distance of 19 miles in \
clear weather.
The station was home to three keepers and their families until 1936, when a road to the village of Port \
Averill was opened and the families moved there. Margaret Doyle, the last of the keepers to be born on the \
island, retired in 1974. The light was automated eleven years later, and the dwellings were sold to the \
Lundmore Trust, which runs a small museum in them. In 2009 the trust restored the original lens, which had \
been stored in a barn near Port Averill since the First World War. About 6,500 people visit the museum each \
summer."""

QUESTIONS = {
    "blank": "Work on the tower began in 1847 under the engineer ____.",
    "facts": "Facts as JSON: year, name",
}
MAX_TOKENS = {"blank": 16, "facts": 48}
WARM_UP = "The ferry leaves at noon and returns before dark. " * 12
REQUEST_S = 120.0


@dataclass(frozen=True)
class Pair:
    """One specialist's two answers to the same prompt."""

    name: str
    question: str
    native: Answer
    codes: Answer
    producer_was_warm: bool


def run_demo() -> None:
    """Prepare, serve, ask, show, and clean up.

    Raises:
        SCDError: something cannot be had; the message says what to do.
    """
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    root = prepare_registry(say)
    settings = PoolSettings(str(root), specialist=SpecialistSettings(cache_tokens=8192, max_batch=8))
    port = _free_port()
    with running_pool(settings, "127.0.0.1", port, say) as standings:
        failed = [f"{s.name}: {s.why}" for s in standings if not s.serves]
        if failed:
            raise PoolError("not all specialists serve: " + "; ".join(failed))
        with Client(f"http://127.0.0.1:{port}", REQUEST_S) as client:
            pairs, producer = ask_all(client, say)
        say("stopping")
    print(report(pairs, producer))


def prepare_registry(say: Say) -> Path:
    """A registry with the two shipped specialists, their models fetched.

    Raises:
        PoolError: they are not shipped with this installation.
    """
    from calibration.demo.publish import publish_demo
    from scd_core.registry import Registry

    root = home() / "demo"
    say("base model and calibrated specialists")
    missing = set(QUESTIONS) - set(publish_demo(Registry(root)))
    if missing:
        raise PoolError(
            f"calibration/demo/registry holds no {', '.join(sorted(missing))}: make them with scd calibrate, "
            "as calibration/demo/README.md says"
        )
    return root


def ask_all(client: Client, say: Say) -> tuple[list[Pair], dict[str, int]]:
    """Every specialist natively and over codes; and what the producer did for the document."""
    for name in QUESTIONS:
        with _progress(say, f"{name}: warming up"):
            client.ask(name, WARM_UP, codes=True, max_tokens=4)
    before = _producer(client)
    pairs: list[Pair] = []
    for name, question in QUESTIONS.items():
        message = f"{DOCUMENT}\n\n{question}"
        with _progress(say, f"{name}: by itself"):
            native = client.ask(name, message, codes=False, max_tokens=MAX_TOKENS[name])
        with _progress(say, f"{name}: over codes"):
            codes = client.ask(name, message, codes=True, max_tokens=MAX_TOKENS[name])
        pairs.append(Pair(name, question, native, codes, bool(pairs)))
    after = _producer(client)
    return pairs, {key: after[key] - before.get(key, 0) for key in after}


def report(pairs: list[Pair], producer: Mapping[str, int]) -> str:
    """What the demo shows, as text."""
    lines = ["", f"One document of {len(DOCUMENT.split())} words, two specialists.", ""]
    for pair in pairs:
        lines += [
            f"{pair.name}: {pair.question}",
            f"  by itself   {_one_line(pair.native.text)}",
            f"  over codes  {_one_line(pair.codes.text)}",
            "",
        ]
    times = "once" if producer["prefixes_prefilled"] == 1 else f"{producer['prefixes_prefilled']} times"
    header = (
        "specialist",
        "prompt",
        "pages from codes",
        "bytes",
        "raw bytes",
        "of raw",
        "TTFT native",
        "TTFT SCD",
        "producer",
    )
    lines += _table([header, *map(_row, pairs)])
    lines += [
        "",
        f"The producer prefilled the document {times} for {len(pairs)} specialists: "
        f"{producer['tokens_prefilled']} tokens; {producer['code_hits']} pages of codes were served again.",
    ]
    for pair in pairs:
        if pair.codes.scd["fallback"]:
            lines.append(f"{pair.name} prefilled natively: {pair.codes.scd['fallback']}")
    return "\n".join(lines)


def _row(pair: Pair) -> tuple[str, ...]:
    scd: dict[str, Any] = pair.codes.scd
    ratio = f"{scd['bytes'] / scd['raw_bytes']:.3f}" if scd["raw_bytes"] else "-"
    return (
        pair.name,
        f"{pair.codes.prompt_tokens} tokens",
        str(scd["pages"]),
        f"{scd['bytes']:,}",
        f"{scd['raw_bytes']:,}",
        ratio,
        f"{pair.native.ttft_s * 1000:.0f} ms",
        f"{pair.codes.ttft_s * 1000:.0f} ms",
        "warm" if pair.producer_was_warm else "cold",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _producer(client: Client) -> dict[str, int]:
    """Counters of the one producer."""
    (stats,) = client.stats()["producers"].values()
    return {key: value for key, value in stats.items() if isinstance(value, int)}


@contextmanager
def _progress(say: Say, what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    say(f"{what} ({time.perf_counter() - start:.2f} s)")


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
