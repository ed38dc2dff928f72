"""The load client against an HTTP server that remembers who has seen which prompt, as the real ones do."""

from __future__ import annotations

import csv
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.client import LoadTestError, Reply, _Seen, _take, ask
from loadtest.prompts import Source, learn_scale
from loadtest.report import save, summarise
from loadtest.ttft import CONDITIONS, Plan, main, measure, order

TOKENS_PER_WORD, TEMPLATE = 2, 17


@dataclass
class Server:
    """What the double has been asked, and how it misbehaves."""

    url: str = ""
    log: list[tuple[str, bool, str]] = field(default_factory=list)  # model, codes, text
    ignore_codes_field: bool = False
    always_cached: bool = False
    break_off: bool = False

    def answer(self, body: dict[str, Any]) -> list[str]:
        text, model = body["messages"][0]["content"], body["model"]
        codes = body["scd"]["codes"] or self.ignore_codes_field
        tokens = TOKENS_PER_WORD * len(text.split()) + TEMPLATE
        cached = tokens if self.always_cached or any(m == model and t == text for m, _, t in self.log) else 0
        self.log.append((model, body["scd"]["codes"], text))
        coded = 0 if cached or not codes else tokens // 32 * 32
        scd = {
            "codes_tokens": coded,
            "cache_tokens": cached,
            "native_tokens": tokens - coded - cached,
            "bytes": coded * 100,
        }
        head = [json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})]
        if self.break_off:
            return [*head, json.dumps({"error": {"message": "lost", "code": "engine"}})]
        return [
            *head,
            json.dumps({"choices": [{"delta": {"content": "A"}, "finish_reason": None}]}),
            json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}, "scd": scd}),
            "[DONE]",
        ]


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] == "unknown":
                self.send_response(404)
                self.end_headers()
                self.wfile.write(b'{"error": {"code": "model_not_found"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in state.answer(body):
                self.wfile.write(f"data: {event}\n\n".encode())

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        yield client


PLAN = Plan("blank", "facts", lengths=(250, 1000), rounds=3, seed=7)


def test_measured_prefixes_are_new_to_the_specialist_and_warm_ones_known_to_the_producer(
    server: Server, client: httpx.Client
) -> None:
    """Guards the comparison itself: a warm prompt first sent to the measured specialist would be answered from
    that specialist's own cache, and a cold one that anyone had sent before would not be cold."""
    samples = list(measure(client, PLAN, Source()))
    assert len(samples) == PLAN.rounds * len(PLAN.lengths) * len(CONDITIONS)
    measured = [(codes, text) for model, codes, text in server.log if model == "blank"]
    texts = [text for _, text in measured]
    assert len(set(texts)) == len(texts)
    assert len({text[:16] for text in texts}) == len(texts), "two prompts share their first page"
    warmed = {text for model, codes, text in server.log if model == "facts" and codes}
    of = {s.condition: s.reply for s in samples}
    assert of["native"].from_codes == 0
    assert of["warm"].from_codes > 0
    assert of["cold"].from_codes > 0
    scale_requests, discarded = 2, len(PLAN.lengths) * len(CONDITIONS)
    pairs = zip(samples, measured[scale_requests + discarded :], strict=True)
    for sample, (codes, text) in pairs:
        assert codes == (sample.condition != "native")
        assert (text in warmed) == (sample.condition == "warm")


def test_every_condition_takes_every_place() -> None:
    """A fixed order would give the drift of the machine to one condition."""
    places = {(condition, i) for turn in range(3) for i, (_, condition) in enumerate(order([250], turn))}
    assert places == {(condition, i) for condition in CONDITIONS for i in range(3)}


def test_prompts_have_the_length_asked_for(client: httpx.Client) -> None:
    """The client learns tokens per word and the template's share from the server; it holds no tokenizer."""
    by_length = {s.length: s.reply.prompt_tokens for s in measure(client, PLAN, Source())}
    assert all(abs(tokens - length) <= TOKENS_PER_WORD for length, tokens in by_length.items())


def test_running_text_keeps_its_order() -> None:
    source = Source(tuple("abcdefghij"), running_text=True)
    text = source.prompt(4, random.Random(1))
    body = text.split(": ", 1)[1].split("\n\n")[0].replace(" ", "")
    assert body in "abcdefghijabcdefghij"
    scale = learn_scale(source, random.Random(1), lambda t: 3 * len(t.split()) + 5)
    assert scale.words(3 * 100 + round(scale.fixed)) == 100


@pytest.mark.parametrize(
    ("fault", "message"),
    [("ignore_codes_field", "came from codes"), ("always_cached", "own cache held")],
)
def test_a_reply_that_came_about_otherwise_is_refused(
    server: Server, client: httpx.Client, fault: str, message: str
) -> None:
    """Without the check a server that ignores ``codes: false`` would show a speed-up of one."""
    setattr(server, fault, True)
    with pytest.raises(LoadTestError, match=message):
        list(measure(client, PLAN, Source()))


def test_errors_name_the_status_and_the_broken_stream(server: Server, client: httpx.Client) -> None:
    with pytest.raises(LoadTestError, match=r"404.*model_not_found"):
        ask(client, "unknown", "hi", codes=True)
    server.break_off = True
    with pytest.raises(LoadTestError, match=r"broke off.*lost"):
        ask(client, "blank", "hi", codes=True)


def test_the_first_token_is_not_the_role_chunk() -> None:
    """The role chunk is sent before prefill: counting it would measure nothing but the network."""
    seen = _Seen()
    _take({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, seen, 1.0)
    _take({"choices": []}, seen, 2.0)
    assert seen.first is None
    _take({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}, seen, 3.0)
    _take({"choices": [{"delta": {"content": "y"}, "finish_reason": "stop"}]}, seen, 4.0)
    assert (seen.first, seen.text[-2:]) == (3.0, ["x", "y"])
    empty = _Seen()
    _take({"choices": [{"delta": {}, "finish_reason": "stop"}]}, empty, 5.0)
    assert empty.first == 5.0


def reply(ttft_s: float, codes: int = 0) -> Reply:
    return Reply(ttft_s, ttft_s, "", 1000, codes, 0, 1000 - codes, codes * 100)


def test_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    """By hand: native 3, 9, 2 s; warm 1, 1, 1 s; ratios 3, 9, 2, so 3; the machine was slow in round 2 alone."""
    rows = [(1000, "native", turn, reply(t)) for turn, t in ((1, 3.0), (2, 9.0), (3, 2.0))]
    rows += [(1000, "warm", turn, reply(1.0, 960)) for turn in (1, 2, 3)]
    native, warm = summarise(rows)
    assert (native.ttft_ms, native.speedup, native.low_ms, native.high_ms) == (3000, 1, 2000, 9000)
    assert (warm.speedup, warm.speedup_low, warm.speedup_high) == (3, 2, 9)
    assert (warm.from_codes, warm.kilobytes) == (960, 96)
    save(rows, tmp_path)
    with (tmp_path / "summary.csv").open() as file:
        saved = list(csv.DictReader(file))
    assert [(s["condition"], float(s["speedup"])) for s in saved] == [("native", 1), ("warm", 3)]
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 1 + len(rows)


def test_the_command_measures_and_saves(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--repeats", "1", "--lengths", "250", "500", "--out", str(tmp_path)]
    main(["--url", server.url, "--model", "blank", "--warm-with", "facts", *options])
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| native | " in printed
    assert "x (" in printed
    with pytest.raises(SystemExit):
        main(["--model", "blank", "--warm-with", "blank"])
