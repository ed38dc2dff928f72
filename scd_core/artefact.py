"""A folder of tensors that is either whole or refused.

``manifest.json`` holds the format's version, the artefact's kind, its JSON description, and the size and SHA-256
of every tensor file beside it. A new folder is written beside its place and renamed into it. In a folder that is
there already the manifest is the one thing replaced, in one rename: tensor files are named by their content, so
that new ones lie beside the old until then. A reader at any moment, and one after a crash at any moment, finds
the old artefact or the new one. Nothing here is ever unpickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from scd_core.errors import ArtefactDigestError, ArtefactFormatError

FORMAT = "scd-artefact"
VERSION = 1
MANIFEST = "manifest.json"
_PART = re.compile(r"[a-z0-9][a-z0-9_]{0,62}")
_FILE_NAME = re.compile(rf"({_PART.pattern})-[0-9a-f]{{16}}\.safetensors")
MANIFEST_LIMIT = 1 << 26


@dataclass(frozen=True, slots=True)
class Artefact:
    """What a folder holds: ``tensors`` by part (one file each) and tensor name."""

    kind: str
    spec: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def write_artefact(folder: Path, artefact: Artefact) -> None:
    """Writes ``folder``, or replaces what it holds.

    Raises:
        ArtefactFormatError: a part's name that a reader would refuse, or a spec that JSON cannot hold.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        files = {}
        for part, tensors in artefact.tensors.items():
            if not _PART.fullmatch(part):
                raise ArtefactFormatError(f"{part!r} is no name of a part")
            data = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
            digest = hashlib.sha256(data).hexdigest()
            name = f"{part}-{digest[:16]}.safetensors"
            files[name] = {"bytes": len(data), "sha256": digest}
            _write(staging / name, data)
        _write(staging / MANIFEST, _manifest(artefact, files))
        staging.chmod(0o755)  # mkdtemp's 0700 would hide a shared registry from other users
        with _locked(folder.parent):
            _publish(staging, folder, files)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def delete_artefact(folder: Path) -> bool:
    """Whether there was one to delete; it is gone in one rename."""
    with _locked(folder.parent):
        if not folder.exists():
            return False
        aside = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
        os.rename(folder, aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    return True


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest, its own fields checked, and no file but itself read.

    Raises:
        ArtefactFormatError: missing, malformed, of another version or kind.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MANIFEST_LIMIT:
            raise ArtefactFormatError(f"{path}: over {MANIFEST_LIMIT} bytes")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtefactFormatError(f"{path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtefactFormatError(f"{path}: not the manifest of an artefact")
    if manifest.get("version") != VERSION or manifest.get("kind") != kind:
        raise ArtefactFormatError(
            f"{path}: {manifest.get('kind')!r} of version {manifest.get('version')!r}, "
            f"expected {kind!r} of {VERSION}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not isinstance(manifest.get("spec"), dict):
        raise ArtefactFormatError(f"{path}: no files or no spec")
    for name, facts in files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(facts, dict):
            raise ArtefactFormatError(f"{path}: {name!r} is no tensor file of an artefact")
    return manifest


def read_artefact(folder: Path, kind: str) -> Artefact:
    """Everything in the folder, verified.

    Raises:
        ArtefactFormatError: manifest or tensors missing, malformed, of another version or kind.
        ArtefactDigestError: the files are not those that were written.
    """
    while True:
        manifest = read_manifest(folder, kind)
        try:
            tensors = {
                name.rsplit("-", 1)[0]: _read_tensors(folder / name, facts)
                for name, facts in manifest["files"].items()
            }
            return Artefact(kind, manifest["spec"], tensors)
        except (ArtefactFormatError, ArtefactDigestError):
            if read_manifest(folder, kind) == manifest:
                raise
            # replaced while it was read: read the new one


def _read_tensors(path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        if path.is_symlink() or not path.is_file():
            raise ArtefactFormatError(f"{path}: missing, or not a plain file")
        if path.stat().st_size != facts.get("bytes"):
            raise ArtefactDigestError(f"{path}: {path.stat().st_size} bytes, {facts.get('bytes')} were written")
        data = path.read_bytes()
    except OSError as error:
        raise ArtefactFormatError(f"{path}: {error}") from error
    # the digest is of the bytes that are parsed, not of the file as it was a moment ago
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise ArtefactDigestError(f"{path}: its SHA-256 is not the manifest's")
    try:
        return dict(safetensors.torch.load(data))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ArtefactFormatError(f"{path}: {error}") from error


def _manifest(artefact: Artefact, files: Mapping[str, Any]) -> bytes:
    content = {
        "format": FORMAT,
        "version": VERSION,
        "kind": artefact.kind,
        "files": files,
        "spec": artefact.spec,
    }
    try:
        return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ArtefactFormatError(f"the description is no JSON: {error}") from error


def _publish(staging: Path, folder: Path, files: Mapping[str, Any]) -> None:
    if not folder.exists():
        os.rename(staging, folder)
    else:
        for name in files:
            os.replace(staging / name, folder / name)
        _sync(folder)
        os.replace(staging / MANIFEST, folder / MANIFEST)
        for path in folder.iterdir():
            if path.name != MANIFEST and path.name not in files:
                path.unlink()
        _sync(folder)
    _sync(folder.parent)


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """One writer at a time in ``parent``; readers need no lock."""
    with (parent / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
