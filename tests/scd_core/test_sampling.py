"""Choice of tokens: distributions, seeds, log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from scd_core.engine import Engine
from scd_core.huggingface import plain_shell
from scd_core.sampling import Choice, SamplingParams
from tests.scd_core.serving import GREEDY, generate, ids, native, prompt
from tests.tiny import tiny_loaded

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(tiny_loaded(), cache_tokens=2048, max_batch=8)
    made.start()
    yield made
    made.stop()


def frequencies(params: SamplingParams, draws: int = 4000) -> torch.Tensor:
    choice = Choice(params)
    counts = Counter(choice.draw(LOGITS) for _ in range(draws))
    return torch.tensor([counts[token] / draws for token in range(len(LOGITS))])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, seed=0), [0, 1, 2, 3, 4]),
        (SamplingParams(temperature=2.0, seed=0), [0, 1, 2, 3, 4]),
        (SamplingParams(temperature=1.0, top_k=2, seed=0), [1, 4]),
        # softmax is .47, .29, .17 for tokens 1, 4, 2: two reach .7, and .8 needs the third
        (SamplingParams(temperature=1.0, top_p=0.7, seed=0), [1, 4]),
        (SamplingParams(temperature=1.0, top_p=0.8, seed=0), [1, 2, 4]),
        (SamplingParams(temperature=1.0, top_p=0.8, top_k=2, seed=0), [1, 4]),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, kept: list[int]) -> None:
    """4,000 draws: a frequency's standard deviation is below .008, and .03 is nearly four of them."""
    masked = torch.full_like(LOGITS, float("-inf"))
    masked[kept] = LOGITS[kept] / params.temperature
    torch.testing.assert_close(frequencies(params), masked.softmax(-1), atol=0.03, rtol=0)


def test_the_seed_alone_decides_in_any_company(engine: Engine) -> None:
    requests = [(prompt(30, seed), replace(SAMPLED, seed=seed)) for seed in range(6)]
    alone = [ids(generate(engine, request)[0]) for request in requests]
    together = generate(engine, *requests, (prompt(77), GREEDY))
    assert [ids(events) for events in together[:-1]] == alone
    assert ids(together[-1]) == native(engine.model, prompt(77))  # and a greedy neighbour stays greedy


def test_seeds_differ_and_no_seed_differs_each_time(engine: Engine) -> None:
    """20 tokens over some hundred likely ones: equal by chance in fewer than one of 10^20 runs."""
    first, second, third, fourth = (
        ids(events)
        for events in generate(
            engine,
            (prompt(30), SAMPLED),
            (prompt(30), replace(SAMPLED, seed=12)),
            (prompt(30), replace(SAMPLED, seed=None)),
            (prompt(30), replace(SAMPLED, seed=None)),
        )
    )
    assert first != second
    assert third != fourth


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}])
def test_the_narrowest_sampling_is_greedy(engine: Engine, narrow: dict[str, float]) -> None:
    (events,) = generate(engine, (prompt(40), replace(SAMPLED, **narrow)))
    assert ids(events) == native(engine.model, prompt(40), 20)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_logprobs_are_those_of_the_raw_logits(engine: Engine, params: SamplingParams) -> None:
    """Of every token, the first included, against one forward over all; temperature must not matter."""
    token_ids = prompt(40)
    hot = replace(params, logprobs=3, temperature=params.temperature * 2)
    (events,) = generate(engine, (token_ids, hot))
    with torch.no_grad():
        logits = plain_shell(engine.model.model)(torch.tensor([token_ids + ids(events)])).logits[0]
    expected = logits.log_softmax(-1)[len(token_ids) - 1 : -1]
    for event, row in zip(events, expected, strict=True):
        values, likeliest = row.topk(3)
        assert event.top is not None
        assert [token for token, _ in event.top] == likeliest.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in event.top]), values, atol=1e-4, rtol=0)
        assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-4)


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    plain, zero = generate(engine, (prompt(20), GREEDY), (prompt(20), replace(GREEDY, logprobs=0)))
    assert {(event.logprob, event.top) for event in plain} == {(None, None)}
    assert all(event.logprob is not None and event.top == [] for event in zero)
