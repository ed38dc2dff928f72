"""The registry: what was saved comes back, names stay inside the root, and one broken artefact hides no other."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scd_core.codec import Decoder, Encoder, ReuseLayer, StreamSpec, identity_codec, zero_codec
from scd_core.errors import (
    ArtefactDigestError,
    ArtefactError,
    ArtefactFormatError,
    CodeEncoderError,
    FingerprintError,
)
from scd_core.packing import fit_packing
from scd_core.registry import Registry, SpecialistArtefact
from scd_core.signature import ModelSignature

LAYERS, KV_DIM = 2, 4
SIGNATURE = ModelSignature(
    family="llama",
    layers=LAYERS,
    heads=2,
    kv_heads=1,
    head_dim=KV_DIM,
    hidden_size=8,
    vocab_size=320,
    rope={"full_attention": {"type": "default", "theta": 10000.0}},
    window=None,
    layer_types=("full_attention",) * LAYERS,
    qk_norm=False,
    attn_softcap=None,
    tokenizer_hash="t" * 32,
    fingerprint="a" * 32,
    max_positions=512,
)
SPECIALIST = dataclasses.replace(SIGNATURE, fingerprint="b" * 32)


def quantised_codec() -> tuple[Encoder, Decoder]:
    """One stream of K and V per layer, with packing tables: everything an encoder may carry."""
    streams = [StreamSpec(layer, kind, KV_DIM) for layer in range(LAYERS) for kind in ("k", "v")]
    generator = torch.Generator().manual_seed(0)
    symbols = torch.randint(-3, 4, (256, LAYERS * 2 * KV_DIM), dtype=torch.int8, generator=generator)
    encoder = Encoder(
        streams,
        [torch.randn(KV_DIM, generator=generator) for _ in streams],
        [torch.linalg.qr(torch.randn(KV_DIM, KV_DIM, generator=generator))[0] for _ in streams],
        steps=torch.full((LAYERS * 2 * KV_DIM,), 0.5),
        packing=fit_packing(symbols),
    ).rounded()
    layers = [ReuseLayer(i, i, bias=torch.zeros(2 * KV_DIM), base=True) for i in range(LAYERS)]
    return encoder, Decoder(encoder, layers, KV_DIM)


def artefact(name: str = "blank", codec: tuple[Encoder, Decoder] | None = None, **fields) -> SpecialistArtefact:
    encoder, decoder = codec or identity_codec(LAYERS, KV_DIM)
    made = SpecialistArtefact(
        name=name,
        producer_source="org/base",
        specialist_source="/models/blank",
        producer=SIGNATURE,
        specialist=SPECIALIST,
        encoder=encoder,
        decoder=decoder,
        provenance={"seen": ["x"], "settings": {"seed": 0}},
        report={"kl": 0.1},
    )
    return dataclasses.replace(made, **fields)


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.mark.parametrize("codec", [identity_codec(LAYERS, KV_DIM), quantised_codec()], ids=["float", "quantised"])
def test_a_specialist_comes_back_as_it_was_saved(registry, codec):
    saved = artefact(codec=codec)
    registry.save_specialist(saved)
    found = registry.load_specialist("blank")
    for field in (
        "name",
        "producer_source",
        "specialist_source",
        "producer",
        "specialist",
        "provenance",
        "report",
    ):
        assert getattr(found, field) == getattr(saved, field)
    assert found.encoder.digest == saved.encoder.digest
    for ours, theirs in ((found.encoder, saved.encoder), (found.decoder, saved.decoder)):
        assert ours.spec() == theirs.spec()
        assert ours.tensors().keys() == theirs.tensors().keys()
        assert all(torch.equal(t, theirs.tensors()[n]) for n, t in ours.tensors().items())
    assert registry.list() == ["blank"]
    assert registry.encoders() == [saved.encoder.digest]


def test_an_empty_registry_need_not_exist(registry):
    assert registry.list() == registry.encoders() == []
    assert registry.entries() == ()
    assert not registry.delete("blank")
    for load in (lambda: registry.load_specialist("blank"), lambda: registry.load_encoder("0" * 32)):
        with pytest.raises(ArtefactFormatError):
            load()
    assert not registry.root.exists()


def test_specialists_share_their_encoder(registry):
    for name in ("one", "two"):
        registry.save_specialist(artefact(name))
    assert registry.list() == ["one", "two"]
    assert len(registry.encoders()) == 1
    assert registry.delete("one")
    assert not registry.delete("one")
    # deleting a specialist must leave the encoder that the other one, and cached codes, need
    assert registry.load_specialist("two").name == "two"


def test_an_encoders_provenance_survives_a_specialist_saved_over_it(registry):
    encoder, _ = quantised_codec()
    registry.save_encoder(encoder, {"producer": "a", "klt": {"step": 0.5}})
    registry.save_specialist(artefact(codec=quantised_codec()))
    assert registry.encoder_provenance(encoder.digest) == {"producer": "a", "klt": {"step": 0.5}}


def test_an_encoder_saved_by_a_specialist_learns_its_provenance_later(registry):
    # without it calibration would not recognise the encoder, and fit another
    encoder, _ = quantised_codec()
    registry.save_specialist(artefact(codec=quantised_codec()))
    assert registry.encoder_provenance(encoder.digest) == {}
    registry.save_encoder(encoder, {"producer": "a"})
    assert registry.encoder_provenance(encoder.digest) == {"producer": "a"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "A", "é", "-a", ".a", "a" * 64, "a\n", "a\0", "a b", "C:\\x"]
)
def test_names_cannot_leave_the_root(registry, name):
    registry.save_specialist(artefact())
    outside = sorted(registry.root.parent.rglob("*"))
    calls = (
        lambda: registry.save_specialist(artefact(name)),
        lambda: registry.load_specialist(name),
        lambda: registry.delete(name),
        lambda: registry.load_encoder(name),
        lambda: registry.encoder_provenance(name),
    )
    for call in calls:
        with pytest.raises(ArtefactFormatError):
            call()
    assert sorted(registry.root.parent.rglob("*")) == outside


def part(registry: Registry, name: str) -> Path:
    return next((registry.root / "specialists" / name).glob("decoder-*.safetensors"))


def edit(path: Path, change) -> None:
    manifest = json.loads(path.read_text())
    change(manifest["spec"])
    path.write_text(json.dumps(manifest))


def test_broken_artefacts_are_named_and_hide_no_other(registry):
    """vmlx-swift#217, vllm#34186: refused by name; the others still load."""
    for name in ("cut", "flipped", "good", "no-manifest", "renamed", "spec"):
        registry.save_specialist(artefact(name))
    specialists = registry.root / "specialists"
    part(registry, "cut").write_bytes(part(registry, "cut").read_bytes()[:-1])
    flipped = bytearray(part(registry, "flipped").read_bytes())
    flipped[-1] ^= 1
    part(registry, "flipped").write_bytes(bytes(flipped))
    (specialists / "no-manifest" / "manifest.json").unlink()
    shutil.copytree(specialists / "good", specialists / "copied")
    (specialists / "renamed").rename(specialists / "other")
    edit(specialists / "spec" / "manifest.json", lambda spec: spec.pop("producer"))
    (specialists / "note.txt").write_text("no artefact")
    errors = {entry.name: entry.error for entry in registry.entries()}
    assert (
        sorted(errors) == registry.list() == ["copied", "cut", "flipped", "good", "no-manifest", "other", "spec"]
    )
    assert errors.pop("good") is None
    assert all(
        error and ("ArtefactFormatError" in error or "ArtefactDigestError" in error) for error in errors.values()
    )
    assert registry.load_specialist("good").name == "good"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(provenance=[]),
        lambda s: s.update(encoder=None),
        lambda s: s.update(encoder="../" * 10),
        lambda s: s.update(specialist_source=3),
        lambda s: s["producer"].pop("rope"),
        lambda s: s["producer"].update(layers="2"),
        lambda s: s["decoder"].update(layers=[{"mode": "magic"}]),
        lambda s: s["decoder"]["layers"][0].update(first=7, last=9),
        lambda s: s["decoder"].pop("kv_dim"),
        lambda s: s["decoder"].update(kv_dim=8),
    ],
)
def test_a_malformed_specialist_is_refused_by_name(registry, change):
    registry.save_specialist(artefact())
    edit(registry.root / "specialists" / "blank" / "manifest.json", change)
    with pytest.raises(ArtefactError):
        registry.load_specialist("blank")


def test_a_decoder_of_another_encoder_is_neither_saved_nor_loaded(registry):
    _, foreign = quantised_codec()
    encoder, _ = identity_codec(LAYERS, KV_DIM)
    with pytest.raises(CodeEncoderError):
        registry.save_specialist(artefact(codec=(encoder, foreign)))
    assert registry.list() == []
    registry.save_specialist(artefact())
    registry.save_specialist(artefact("other", codec=quantised_codec()))
    edit(
        registry.root / "specialists" / "blank" / "manifest.json",
        lambda s: s.update(encoder=foreign.encoder_digest),
    )
    with pytest.raises(CodeEncoderError):
        registry.load_specialist("blank")


def test_an_encoder_under_another_digest_is_refused(registry):
    encoder, _ = identity_codec(LAYERS, KV_DIM)
    registry.save_encoder(encoder)
    folder = registry.root / "encoders"
    (folder / encoder.digest).rename(folder / ("0" * 32))
    with pytest.raises(ArtefactDigestError, match=encoder.digest):
        registry.load_encoder("0" * 32)


def test_saving_over_a_broken_encoder_mends_it(registry):
    registry.save_specialist(artefact())
    encoder = registry.load_specialist("blank").encoder
    path = next((registry.root / "encoders" / encoder.digest).glob("*.safetensors"))
    path.write_bytes(b"")
    assert "encoder" in (registry.entries()[0].error or "")
    registry.save_specialist(artefact())
    assert registry.entries()[0].error is None


def test_saves_at_the_same_time_leave_whole_artefacts(registry):
    codecs, faults = [identity_codec(LAYERS, KV_DIM), zero_codec(LAYERS, KV_DIM), quantised_codec()], []

    def save(index: int) -> None:
        try:
            for turn in range(6):
                name = "shared" if turn % 2 else f"own-{index}"
                registry.save_specialist(artefact(name, codecs[index], report={"by": index}))
                registry.load_specialist("shared" if turn else name)
        except Exception as error:
            faults.append(repr(error))

    registry.save_specialist(artefact("shared", codecs[0]))
    threads = [threading.Thread(target=save, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults
    assert [e.error for e in registry.entries()] == [None] * 4
    found = registry.load_specialist("shared")
    # the decoder and the report are of the same writer
    wanted = codecs[found.report["by"]][1]
    assert found.decoder.spec() == wanted.spec()
    assert found.encoder.digest == wanted.encoder_digest


def model(signature: ModelSignature) -> SimpleNamespace:
    return SimpleNamespace(signature=signature)


def test_the_calibrated_models_pass():
    artefact().verify()
    # a load with a lower limit on positions is still the same model
    shorter = dataclasses.replace(SPECIALIST, max_positions=128)
    artefact().verify(producer=model(SIGNATURE), specialist=model(shorter))


def test_swapped_weights_are_refused_with_both_fingerprints():
    """vllm#55776: same name, other weights."""
    swapped = dataclasses.replace(SPECIALIST, fingerprint="c" * 32)
    with pytest.raises(FingerprintError, match="specialist") as caught:
        artefact().verify(producer=model(SIGNATURE), specialist=model(swapped))
    assert "b" * 32 in str(caught.value)
    assert "c" * 32 in str(caught.value)
    assert "producer" not in str(caught.value)


def test_every_difference_of_both_models_is_named():
    """DeepSpeed#8345: other rope_theta under the same weights."""
    rope = {"full_attention": {"type": "default", "theta": 500000.0}}
    with pytest.raises(FingerprintError) as caught:
        artefact().verify(
            producer=model(dataclasses.replace(SIGNATURE, rope=rope)),
            specialist=model(dataclasses.replace(SPECIALIST, fingerprint="d" * 32, tokenizer_hash="u" * 32)),
        )
    for named in ("500000.0", "10000.0", "d" * 32, "b" * 32, "u" * 32, "t" * 32):
        assert named in str(caught.value)
