"""Continuous batching against plain ``generate`` on the same model: what does the paged cache cost?

``generate`` gets all prompts as one left-padded batch, the engine gets them at once as separate streams. Prompts
differ from each other and between repeats, so no page is found cached. Each repeat runs both, in turns; figures
are medians over the repeats, and the ratio is the median of the repeats' own ratios.

SmolLM2-135M, float32, 2 cores busy with other work, runs of 2 or 3 repeats: ratios of 0.43, 0.95 and 1.00 for one
request, 0.85 and 0.88 for 4, 0.89 and 1.13 for 16, all answers equal. With transformers' dense mask over all
requests (see attention.py) in one run: 1.32 for one, 1.68 for 4.

    python -m scd_core.engine_bench MODEL [--prompt-tokens 253] [--new-tokens 32] [--requests 1 4 16] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from scd_core.engine import Engine
from scd_core.huggingface import LoadedModel, load_model, plain_shell
from scd_core.sampling import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("--prompt-tokens", type=int, default=253)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    model = load_model(args.model)
    plain = plain_shell(model.model)
    engine = Engine(model, cache_tokens=2 * max(args.requests) * (args.prompt_tokens + args.new_tokens))
    engine.start()
    try:
        print(f"{args.prompt_tokens} prompt tokens, {args.new_tokens} new, {torch.get_num_threads()} threads")
        print(f"{'requests':>8} {'generate s':>11} {'engine s':>9} {'ratio':>6} {'first token s':>14} {'same':>5}")
        for count in args.requests:
            rows = [
                _compare(model, plain, engine, count, args.prompt_tokens, args.new_tokens, seed)
                for seed in range(args.repeats + 1)
            ][1:]  # the first one warms up
            static, paged, first, same = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(row[1] / row[0] for row in rows)
            print(
                f"{count:>8} {static:>11.2f} {paged:>9.2f} {ratio:>6.2f} {first:>14.2f} {same:>5.0%}", flush=True
            )
    finally:
        engine.stop()


def _compare(
    model: LoadedModel, plain: PreTrainedModel, engine: Engine, count: int, length: int, new: int, seed: int
) -> tuple[float, float, float, float]:
    """Seconds of ``generate``, of the engine, to its first tokens (mean), and the share of equal answers."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    # lengths differ a little, as they do in life: hence the left padding
    prompts = [
        torch.randint(10, model.signature.vocab_size, (length - row % 4,), generator=generator).tolist()
        for row in range(count)
    ]
    static: list[list[int]] = []
    paged: list[tuple[list[int], float]] = []
    seconds = {}
    runs: list[Callable[[], None]] = [
        lambda: static.extend(_generate(plain, prompts, new)),
        lambda: paged.extend(asyncio.run(_stream(engine, prompts, new))),
    ]
    for which in (0, 1) if seed % 2 else (1, 0):
        start = time.perf_counter()
        runs[which]()
        seconds[which] = time.perf_counter() - start
    same = sum(ids == found for ids, (found, _) in zip(static, paged, strict=True)) / count
    return seconds[0], seconds[1], statistics.mean(first for _, first in paged), same


@torch.no_grad()
def _generate(plain: PreTrainedModel, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    width = max(len(ids) for ids in prompts)
    batch = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    out = plain.generate(
        batch, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [row[width:].tolist() for row in out]


async def _stream(engine: Engine, prompts: Sequence[list[int]], new: int) -> list[tuple[list[int], float]]:
    params = SamplingParams(max_tokens=new, ignore_eos=True)

    async def one(prompt: list[int]) -> tuple[list[int], float]:
        start, first, ids = time.perf_counter(), 0.0, []
        async for event in engine.stream(prompt, params):
            first = first or time.perf_counter() - start
            ids.append(event.token_id)
        return ids, first

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


if __name__ == "__main__":
    main()
