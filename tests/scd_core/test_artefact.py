"""Artefacts: whole or refused, and never in between, whoever writes, dies or reads at the same time."""

import json
import os
import shutil
import threading

import pytest
import safetensors.torch
import torch

from scd_core import artefact as module
from scd_core.artefact import Artefact, delete_artefact, read_artefact, read_manifest, write_artefact
from scd_core.errors import ArtefactDigestError, ArtefactError, ArtefactFormatError


def artefact(value: int = 1) -> Artefact:
    tensors = {
        "w": torch.full((3, 5), float(value)),
        "b": torch.arange(4, dtype=torch.int8),
        "e": torch.zeros(0, 2),
    }
    return Artefact(
        "toy", {"value": value, "π": [1, None]}, {"one": tensors, "two": {"h": torch.ones(2).bfloat16()}}
    )


@pytest.fixture
def folder(tmp_path):
    write_artefact(tmp_path / "a", artefact())
    return tmp_path / "a"


def tensor_file(folder, part: str = "one"):
    return next(folder.glob(f"{part}-*.safetensors"))


def edit(folder, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_what_was_written_is_read(folder):
    found = read_artefact(folder, "toy")
    assert found.spec == artefact().spec
    for part, tensors in artefact().tensors.items():
        assert found.tensors[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found.tensors[part][name].dtype == tensor.dtype
            assert torch.equal(found.tensors[part][name], tensor)
    assert [p.name for p in folder.parent.iterdir() if p.name not in ("a", ".lock")] == []


def test_replacing_leaves_only_the_new_one(folder):
    write_artefact(folder, artefact(2))
    assert read_artefact(folder, "toy").spec["value"] == 2
    assert len(list(folder.iterdir())) == 3


def test_every_flipped_byte_is_refused(folder):
    for path in folder.iterdir():
        good = path.read_bytes()
        for position in range(0, len(good), 7):
            broken = bytearray(good)
            broken[position] ^= 0x20
            path.write_bytes(bytes(broken))
            try:
                found = read_artefact(folder, "toy")
            except ArtefactError:
                continue
            # in the manifest a flip may hit an indent or the description; the tensors it never may
            assert path.name == "manifest.json"
            assert torch.equal(found.tensors["one"]["w"], artefact().tensors["one"]["w"])
        path.write_bytes(good)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_tensor_file_is_refused_by_its_size(folder, keep):
    """vmlx-swift#217: truncated safetensors read as zeros."""
    path = tensor_file(folder)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtefactDigestError, match=path.name):
        read_artefact(folder, "toy")


def test_a_wrong_header_length_is_refused_even_with_an_agreeing_digest(folder):
    path = tensor_file(folder)
    data = (2**40).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(data)
    digest = module.hashlib.sha256(data).hexdigest()
    edit(folder, lambda m: m["files"][path.name].update(sha256=digest))
    with pytest.raises(ArtefactFormatError, match=path.name):
        read_artefact(folder, "toy")


def test_other_tensors_of_the_same_size_are_refused(folder):
    path = tensor_file(folder, "two")
    path.write_bytes(safetensors.torch.save({"h": torch.zeros(2).bfloat16()}))
    with pytest.raises(ArtefactDigestError):
        read_artefact(folder, "toy")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=2),
        lambda m: m.update(format="other"),
        lambda m: m.update(kind="other"),
        lambda m: m.pop("files"),
        lambda m: m.update(files=[]),
        lambda m: m.update(spec=None),
        lambda m: m["files"].update({next(iter(m["files"])): None}),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(folder, change):
    edit(folder, change)
    with pytest.raises(ArtefactFormatError, match=r"manifest\.json"):
        read_artefact(folder, "toy")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": NaN}', "[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ArtefactFormatError):
        read_manifest(folder, "toy")


@pytest.mark.parametrize(
    "name", ["../secret-0123456789abcdef.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""]
)
def test_a_manifest_cannot_name_a_file_elsewhere(folder, name):
    data = safetensors.torch.save({"x": torch.ones(1)})
    (folder.parent / "secret-0123456789abcdef.safetensors").write_bytes(data)
    facts = {"bytes": len(data), "sha256": module.hashlib.sha256(data).hexdigest()}
    edit(folder, lambda m: m["files"].update({name: facts}))
    with pytest.raises(ArtefactFormatError, match="no tensor file"):
        read_artefact(folder, "toy")


def test_a_link_out_of_the_folder_is_not_followed(folder):
    path = tensor_file(folder)
    shutil.move(path, folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(ArtefactFormatError, match="plain file"):
        read_artefact(folder, "toy")


@pytest.mark.parametrize("missing", ["manifest.json", "one"])
def test_a_missing_file_is_refused(folder, missing):
    (folder / missing if missing == "manifest.json" else tensor_file(folder, missing)).unlink()
    with pytest.raises(ArtefactFormatError, match=missing):
        read_artefact(folder, "toy")


class Killed(BaseException):
    """Stands for a process that ends here: no handler of the code under test may catch it."""


@pytest.mark.parametrize("call", range(12))
def test_a_writer_that_dies_anywhere_leaves_the_old_or_the_new(folder, monkeypatch, call):
    """Each change of the file system is one call of ``os``: dies before the n-th, for every n there is."""
    count = 0

    def dying(function):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count > call:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    for name in ("replace", "rename", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    try:
        write_artefact(folder, artefact(2))
        died = False
    except Killed:
        died = True
    monkeypatch.undo()
    found = read_artefact(folder, "toy")
    assert found.spec["value"] == found.tensors["one"]["w"][0, 0]
    assert died or found.spec["value"] == 2
    write_artefact(folder, artefact(3))
    assert read_artefact(folder, "toy").spec["value"] == 3
    assert len(list(folder.iterdir())) == 3


def test_readers_see_one_or_the_other_while_writers_race(folder):
    faults, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                found = read_artefact(folder, "toy")
                if found.spec["value"] != found.tensors["one"]["w"][0, 0]:
                    faults.append("a mixture")
            except Exception as error:
                faults.append(repr(error))

    def write(start: int) -> None:
        for value in range(start, start + 15):
            write_artefact(folder, artefact(value))

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(100 * n,)) for n in range(1, 4)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join(120)
    done.set()
    for thread in readers:
        thread.join(60)
    assert not faults
    assert read_artefact(folder, "toy").spec["value"] % 100 == 14
    assert len(list(folder.iterdir())) == 3


def test_deleting_says_whether_there_was_one(folder):
    assert delete_artefact(folder)
    assert not folder.exists()
    assert not delete_artefact(folder)


@pytest.mark.parametrize(
    "bad",
    [
        Artefact("toy", {}, {"../x": {}}),
        Artefact("toy", {}, {"x-y": {}}),
        Artefact("toy", {"nan": float("nan")}, {}),
    ],
)
def test_what_no_reader_would_take_is_not_written(folder, bad):
    with pytest.raises(ArtefactFormatError):
        write_artefact(folder, bad)
    assert read_artefact(folder, "toy").spec["value"] == 1
    assert {p.name for p in folder.parent.iterdir()} == {"a", ".lock"}
