"""Time to the first token through HTTP: the specialist's own prefill against codes, producer warm and cold.

``python -m loadtest.ttft --url http://127.0.0.1:8000 --model blank --warm-with facts --out results/ttft``

Three conditions, each with a prompt that the measured specialist has never seen:

- *native*: ``"scd": {"codes": false}``, the specialist prefills everything;
- *warm*: the same prompt went to another specialist first, so the producer holds its codes and the measured
  specialist holds nothing;
- *cold*: nobody has seen the prompt; the producer prefills it now.

Every round measures every length under every condition, in an order that rotates from round to round, so a slow
spell of the machine does not fall on one condition. The first round is thrown away. Ratios are taken within a
round and their median is reported.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.client import LoadTestError, Reply, ask
from loadtest.prompts import Source, learn_scale
from loadtest.report import save, table

CONDITIONS = ("native", "warm", "cold")
CACHED_SHARE = 0.1  # a long template may be cached; a document must not be


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request."""

    length: int
    condition: str
    round: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    model: str
    warm_with: str
    lengths: tuple[int, ...]
    rounds: int
    max_tokens: int = 8
    seed: int | None = None


def order(lengths: Sequence[int], turn: int) -> list[tuple[int, str]]:
    """Every length under every condition; over three rounds each condition is first, second and last once."""
    places = [CONDITIONS[(turn + i) % len(CONDITIONS)] for i in range(len(CONDITIONS))]
    return [(length, condition) for length in lengths for condition in places]


def measure(client: httpx.Client, plan: Plan, source: Source) -> Iterator[Sample]:
    """Samples as they come; round 0 warms the server up and is not among them."""
    rng = random.Random(plan.seed)  # unseeded by default: a second run must not meet the first one's prefixes

    def count(text: str) -> int:
        return ask(client, plan.model, text, codes=False, max_tokens=1).prompt_tokens

    scale = learn_scale(source, rng, count)
    for turn in range(plan.rounds + 1):
        for length, condition in order(plan.lengths, turn):
            text = source.prompt(scale.words(length), rng)
            if condition == "warm":
                ask(client, plan.warm_with, text, codes=True, max_tokens=1)
            reply = ask(client, plan.model, text, codes=condition != "native", max_tokens=plan.max_tokens)
            check(condition, reply)
            if turn > 0:
                yield Sample(length, condition, turn, reply)


def check(condition: str, reply: Reply) -> None:
    """Refuses a reply that came about in another way than its condition says."""
    if condition == "native" and reply.from_codes:
        raise LoadTestError(f"native: {reply.from_codes} tokens came from codes although they were refused")
    if reply.from_cache > CACHED_SHARE * reply.prompt_tokens:
        raise LoadTestError(
            f"{condition}: the specialist's own cache held {reply.from_cache} of {reply.prompt_tokens} tokens"
        )


def read_source(path: Path | None) -> Source:
    if path is None:
        return Source()
    words = path.read_text(encoding="utf-8").split()
    if not words:
        raise LoadTestError(f"{path}: holds no words")
    return Source(tuple(words), running_text=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first token: native against codes, warm and cold.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the specialist that is measured")
    parser.add_argument("--warm-with", required=True, help="another specialist of the same producer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 1000, 4000], help="prompt tokens, about")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--text", type=Path, help="text to cut prompts from; common words at random without")
    parser.add_argument("--out", type=Path, default=Path("results/ttft"))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without a byte before giving up")
    args = parser.parse_args(arguments)
    if args.model == args.warm_with:
        parser.error("--warm-with must be another specialist: the measured one would have the prompt cached")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a line per request, then the table; saves CSV, Markdown and a plot under ``--out``."""
    args = parse(arguments)
    plan = Plan(args.model, args.warm_with, tuple(args.lengths), args.repeats, args.max_tokens)
    key = os.environ.get("SCD_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    samples: list[Sample] = []
    with httpx.Client(base_url=args.url, timeout=args.timeout, headers=headers) as client:
        for sample in measure(client, plan, read_source(args.text)):
            samples.append(sample)
            reply = sample.reply
            print(
                f"{sample.round}/{plan.rounds} {sample.condition:6} {reply.prompt_tokens:5} tokens "
                f"({reply.from_codes} from codes, {reply.from_cache} cached): {reply.ttft_s * 1000:.0f} ms",
                flush=True,
            )
    rows = [(s.length, s.condition, s.round, s.reply) for s in samples]
    print("\n" + table(rows))
    save(rows, args.out)
    print(f"\nsaved in {args.out}")


if __name__ == "__main__":
    main()
