"""A whole pool on real Ray, over real HTTP: two specialists of their producer's weights, and one of others."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client import Client
from app.serve import PoolNote, deploy
from deployments.config import PoolSettings, SpecialistSettings
from deployments.names import REGISTRAR, producer_application
from scd_core.codec import HELD_BACK, identity_codec
from scd_core.huggingface import LoadedModel, load_model
from scd_core.pages import coded_tokens
from scd_core.registry import Registry, SpecialistArtefact
from tests.scd_core.serving import native
from tests.tiny import tiny_folder

TOKEN = "token-of-the-test"
WAIT_S = 60.0


@dataclass
class Pool:
    """A running pool and what it was made of."""

    url: str
    registry: Registry
    model: LoadedModel
    artefact: SpecialistArtefact
    folders: dict[str, Path]

    def ask(self, name: str, text: str, **body: Any) -> dict[str, Any]:
        """A greedy completion of 12 tokens."""
        response = self.post("/v1/completions", {**self.body(name, text), **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    @staticmethod
    def body(name: str, text: str) -> dict[str, Any]:
        return {
            "model": name,
            "prompt": text,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "scd": {"usage": True},
        }

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_S, trust_env=False)

    def own_text(self, text: str) -> str:
        """What plain ``generate`` answers."""
        ids = self.model.tokenizer(text)["input_ids"]
        return str(self.model.tokenizer.decode(native(self.model, ids), skip_special_tokens=True))

    def specialist(self, name: str) -> dict[str, Any]:
        with Client(self.url) as client:
            return dict(client.stats()["specialists"][name])

    def producer(self) -> dict[str, Any]:
        with Client(self.url) as client:
            (stats,) = client.stats()["producers"].values()
            return dict(stats)


def until(condition: Any) -> None:
    """Wait for what another process does; fails when it does not come."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """``one`` and ``two`` have the producer's weights; ``swapped`` has other weights than were calibrated."""
    from ray import serve

    root = tmp_path_factory.mktemp("pool")
    base = tiny_folder(root / "base")
    folders = {"one": tiny_folder(root / "one"), "two": tiny_folder(root / "two")}
    folders["swapped"] = tiny_folder(root / "swapped", seed=8)
    model = load_model(base)
    encoder, decoder = identity_codec(model.layers, model.kv_dim)
    registry = Registry(root / "registry")
    artefact = SpecialistArtefact(
        "one", str(base), str(folders["one"]), model.signature, model.signature, encoder, decoder
    )
    for name, folder in folders.items():
        registry.save_specialist(replace(artefact, name=name, specialist_source=str(folder)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = PoolSettings(
        str(registry.root),
        cpus=0.1,
        threads=1,
        specialist=SpecialistSettings(cache_tokens=4096, max_batch=8, connect_s=1.0, cooldown_s=0.2),
    )
    deploy(settings, "127.0.0.1", port, TOKEN, print)
    yield Pool(f"http://127.0.0.1:{port}", registry, model, artefact, folders)
    serve.shutdown()


TEXT = "The ferry crosses the sound twice a day and returns before dark. " * 3


class TestPool:
    """In this order: the last tests break the pool."""

    def test_swapped_weights_are_refused_by_name(self, pool: Pool) -> None:
        """vllm#55776: not listed, not served from anything else, and visible with the reason."""
        listed = httpx.get(pool.url + "/v1/models", trust_env=False).json()["data"]
        assert [m["id"] for m in listed] == ["one", "two"]
        response = pool.post("/v1/completions", {"model": "swapped", "prompt": "x"})
        assert response.status_code == 503
        assert "FingerprintError" in response.json()["error"]["message"]

    def test_two_specialists_one_prefix(self, pool: Pool) -> None:
        """The producer prefilled once; both answers are what the specialist itself would say."""
        before = pool.producer()
        expected = pool.own_text(TEXT)
        for name in ("one", "two"):
            answer = pool.ask(name, TEXT)
            assert answer["choices"][0]["text"] == expected
            assert answer["scd"]["fallback"] is None
            assert (
                answer["scd"]["pages"] == coded_tokens(answer["usage"]["prompt_tokens"], 32, HELD_BACK) // 32 > 2
            )
            assert answer["scd"]["bytes"] > 0
        after = pool.producer()
        assert after["prefixes_prefilled"] - before["prefixes_prefilled"] == 1
        assert after["tokens_prefilled"] - before["tokens_prefilled"] == 32 * answer["scd"]["pages"]
        until(lambda: pool.producer()["leases"] == 0)

    def test_stream_equals_whole(self, pool: Pool) -> None:
        text = "Ünïcode 世界 🙂. " * 12
        whole = pool.ask("one", text)
        body = {**pool.body("one", text), "stream": True, "stream_options": {"include_usage": True}}
        blocks = pool.post("/v1/completions", body).text.removesuffix("\n\n").split("\n\n")
        assert blocks.count("data: [DONE]") == 1
        assert blocks.pop() == "data: [DONE]"
        chunks = [json.loads(b.removeprefix("data: ")) for b in blocks]
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
        assert chunks[-1]["usage"] == {
            **whole["usage"],
            "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"],
        }
        assert chunks[-1]["scd"]["cache_tokens"] > 0

    def test_without_codes(self, pool: Pool) -> None:
        answer = pool.ask("one", TEXT, scd={"usage": True, "codes": False})
        assert answer["choices"][0]["text"] == pool.own_text(TEXT)
        assert answer["scd"]["native_tokens"] == answer["usage"]["prompt_tokens"]

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({"model": "nobody", "prompt": "x"}, 404, "model_not_found"),
            ({"model": "one", "prompt": "x" * 3000}, 400, "context_length_exceeded"),
            ({"model": "one", "prompt": "x", "max_tokens": 10**8}, 400, "context_length_exceeded"),
            ({"model": "one", "prompt": [5, 10**6]}, 400, "invalid_prompt"),
            ({"model": "one", "prompt": ""}, 400, "invalid_prompt"),
        ],
    )
    def test_errors_keep_their_shape(self, pool: Pool, body: dict[str, Any], status: int, code: str) -> None:
        """Through two processes, without Ray's wrapping and traceback in the message (modular#6673)."""
        response = pool.post("/v1/completions", body)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert "Traceback" not in response.text
        assert "ray" not in response.text

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves(self, pool: Pool, stream: bool) -> None:
        """production-stack#867: the engine stops; the gauge is back at zero."""
        body = {**pool.body("one", "long "), "max_tokens": 400, "stream": stream}
        with httpx.Client(base_url=pool.url, trust_env=False, timeout=WAIT_S) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.05)
        until(lambda: pool.specialist("one")["in_flight"] == 0)
        until(lambda: pool.specialist("one")["engine"]["running"] == 0)
        assert pool.ask("one", "after")["usage"]["completion_tokens"] == 12

    def test_a_specialist_is_registered_while_others_serve(self, pool: Pool) -> None:
        """Nobody else is restarted: their counters go on."""
        before = pool.specialist("one")["requests"]
        pool.registry.save_specialist(
            replace(pool.artefact, name="three", specialist_source=str(pool.folders["two"]))
        )
        with Client(pool.url) as client:
            rows = {row["name"]: row["status"] for row in client.reconcile(TOKEN)}
        assert rows["three"] == "RUNNING"
        assert pool.ask("three", TEXT)["choices"][0]["text"] == pool.own_text(TEXT)
        assert pool.specialist("one")["requests"] == before

    def test_a_specialist_is_removed(self, pool: Pool) -> None:
        """By the registrar itself, so that the interface still holds a handle of it and must find out."""
        from ray import serve

        pool.registry.delete("three")
        standings = serve.get_app_handle(REGISTRAR).reconcile.remote().result(timeout_s=WAIT_S)
        assert "three" not in {s.name for s in standings}
        codes = [pool.post("/v1/completions", {"model": "three", "prompt": "x"}).status_code for _ in range(2)]
        assert codes[0] in {404, 503}
        assert codes[1] == 404

    def test_a_damaged_artefact_hides_no_other(self, pool: Pool) -> None:
        """vmlx-swift#217: refused by its digest; the others still serve."""
        pool.registry.save_specialist(replace(pool.artefact, name="broken"))
        (tensors,) = (pool.registry.root / "specialists" / "broken").glob("*.safetensors")
        tensors.write_bytes(tensors.read_bytes()[:-7])
        with Client(pool.url) as client:
            rows = {row["name"]: row for row in client.reconcile(TOKEN)}
        assert rows["broken"]["status"] == "REFUSED"
        assert "ArtefactDigestError" in rows["broken"]["message"]
        assert pool.ask("one", TEXT)["choices"][0]["text"] == pool.own_text(TEXT)

    def test_producer_killed(self, pool: Pool) -> None:
        """The answer is the specialist's own, and the counter says why; once Serve has a new one it is used."""
        import ray

        text = "A second harbour was dug in the north, where the water is deep. " * 3
        application = producer_application(pool.model.signature.fingerprint)
        actors = ray.util.list_named_actors(all_namespaces=True)
        (name,) = [a["name"] for a in actors if application in a["name"]]
        ray.kill(ray.get_actor(name, namespace="serve"))
        answer = pool.ask("one", text)
        assert answer["choices"][0]["text"] == pool.own_text(text)
        assert answer["scd"]["fallback"] == "producer_unavailable"
        assert answer["scd"]["native_tokens"] == answer["usage"]["prompt_tokens"]
        assert pool.specialist("one")["fallbacks"]["producer_unavailable"] >= 1
        fresh = (f"Part {i}: {text}" for i in itertools.count())
        until(lambda: pool.ask("one", next(fresh))["scd"]["pages"] > 0)


def test_the_note_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a token."""
    monkeypatch.setenv("SCD_HOME", str(tmp_path))
    note = PoolNote("http://127.0.0.1:1", "/r", "secret")
    assert PoolNote.read() is None
    with note.left():
        assert PoolNote.path().stat().st_mode & 0o777 == 0o600
        assert PoolNote.read() == note
    assert PoolNote.read() is None
