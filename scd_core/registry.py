"""The registry: a folder of encoders, which specialists share, and of specialists, each one's decoder.

::

    encoders/<digest>/     an encoder, and what it was fitted to
    specialists/<name>/    both models' signatures, a decoder, provenance and the measured report

A broken artefact is refused by name and hides no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scd_core.artefact import Artefact, delete_artefact, read_artefact, read_manifest, write_artefact
from scd_core.decoder import Decoder
from scd_core.encoder import Encoder
from scd_core.errors import ArtefactDigestError, ArtefactError, ArtefactFormatError, CodeError, FingerprintError
from scd_core.packing import Packer
from scd_core.signature import ModelSignature

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Signed(Protocol):
    """A model at hand (``huggingface.LoadedModel`` offers it)."""

    @property
    def signature(self) -> ModelSignature: ...


@dataclass(frozen=True)
class SpecialistArtefact:
    """All that serving a specialist from a producer's codes needs, but the models.

    Attributes:
        producer_source, specialist_source: hub ids or folders, where the models were when it was made.
        provenance: how it was calibrated, JSON.
        report: what was measured, JSON.
    """

    name: str
    producer_source: str
    specialist_source: str
    producer: ModelSignature
    specialist: ModelSignature
    encoder: Encoder
    decoder: Decoder
    provenance: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def verify(self, producer: Signed | None = None, specialist: Signed | None = None) -> None:
        """Refuses a model that is not the one calibrated: other weights, RoPE or tokenizer under the same name.

        Raises:
            FingerprintError: names every difference with both values.
        """
        differences = []
        for role, expected, model in (
            ("producer", self.producer, producer),
            ("specialist", self.specialist, specialist),
        ):
            if model is None:
                continue
            differences += [
                f"{role}'s {name} is {found}, calibrated was {wanted}"
                for name in ("fingerprint", "tokenizer_hash", "rope")
                if (found := getattr(model.signature, name)) != (wanted := getattr(expected, name))
            ]
        if differences:
            raise FingerprintError(f"{self.name}: " + "; ".join(differences))


@dataclass(frozen=True, slots=True)
class Entry:
    """A specialist of the registry: ``error`` says why it cannot be loaded, or is None."""

    name: str
    error: str | None


class Registry:
    """Artefacts below ``root``, which need not exist yet. Any number of processes may read and write at once."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def encoders(self) -> list[str]:
        """Digests of the encoders, broken ones included."""
        return _names(self.root / "encoders", _DIGEST)

    def save_encoder(self, encoder: Encoder, provenance: Mapping[str, Any] | None = None) -> None:
        """Saves an encoder under its digest; one that is there and whole stays, unless only ``provenance`` is new.

        Raises:
            ArtefactFormatError: the provenance is no JSON.
        """
        try:
            self.load_encoder(encoder.digest)
            if not provenance or self.encoder_provenance(encoder.digest):
                return
        except ArtefactError:
            pass  # none there, or a broken one, which this mends
        spec = {"encoder": encoder.spec(), "provenance": dict(provenance or {})}
        folder = self._encoder_folder(encoder.digest)
        write_artefact(folder, Artefact("encoder", spec, {"encoder": encoder.tensors()}))

    def load_encoder(self, digest: str) -> Encoder:
        """The encoder of this digest.

        Raises:
            ArtefactFormatError: unknown or malformed.
            ArtefactDigestError: not the encoder that was saved.
        """
        found = read_artefact(self._encoder_folder(digest), "encoder")
        with _malformed(f"encoder {digest}"):
            encoder = Encoder.from_tensors(_mapping(found.spec, "encoder"), _part(found, "encoder"))
        if encoder.digest != digest:
            raise ArtefactDigestError(f"encoder {digest} holds encoder {encoder.digest}")
        Packer.of(encoder)  # its tables are part of it: refuse them here, not at the first request
        return encoder

    def encoder_provenance(self, digest: str) -> dict[str, Any]:
        """What the encoder was fitted to, without loading its tensors.

        Raises:
            ArtefactFormatError: unknown or malformed.
        """
        return _mapping(read_manifest(self._encoder_folder(digest), "encoder")["spec"], "provenance")

    def list(self) -> list[str]:
        """Names of the specialists, broken ones included."""
        return _names(self.root / "specialists", NAME)

    def entries(self) -> tuple[Entry, ...]:
        """Every specialist, loaded once to say whether it can be."""
        found = []
        for name in self.list():
            try:
                self.load_specialist(name)
                found.append(Entry(name, None))
            except (ArtefactError, CodeError) as error:
                found.append(Entry(name, f"{type(error).__name__}: {error}"))
        return tuple(found)

    def save_specialist(self, artefact: SpecialistArtefact) -> None:
        """Saves a specialist and its encoder, replacing one of the same name.

        Raises:
            ArtefactFormatError: a name that is none, or provenance or report that are no JSON.
            CodeEncoderError: the decoder was fitted to another encoder.
        """
        folder = self._specialist_folder(artefact.name)
        spec = {
            "name": artefact.name,
            "producer_source": artefact.producer_source,
            "specialist_source": artefact.specialist_source,
            "producer": artefact.producer.to_json(),
            "specialist": artefact.specialist.to_json(),
            "encoder": artefact.encoder.digest,
            "decoder": artefact.decoder.spec(),
            "provenance": artefact.provenance,
            "report": artefact.report,
        }
        tensors = artefact.decoder.tensors()
        Decoder.from_tensors(artefact.decoder.spec(), tensors, artefact.encoder)
        self.save_encoder(artefact.encoder)
        write_artefact(folder, Artefact("specialist", spec, {"decoder": tensors}))

    def load_specialist(self, name: str) -> SpecialistArtefact:
        """The specialist of this name, its encoder with it.

        Raises:
            ArtefactFormatError: unknown or malformed, itself or its encoder.
            ArtefactDigestError: files are not those that were written.
            CodeEncoderError: its decoder was fitted to another encoder.
        """
        found = read_artefact(self._specialist_folder(name), "specialist")
        spec = found.spec
        if spec.get("name") != name:
            raise ArtefactFormatError(f"specialist {name!r} holds {spec.get('name')!r}")
        encoder = self.load_encoder(_text(spec, "encoder"))
        with _malformed(f"specialist {name}"):
            decoder = Decoder.from_tensors(_mapping(spec, "decoder"), _part(found, "decoder"), encoder)
        return SpecialistArtefact(
            name=name,
            producer_source=_text(spec, "producer_source"),
            specialist_source=_text(spec, "specialist_source"),
            producer=ModelSignature.from_json(_mapping(spec, "producer")),
            specialist=ModelSignature.from_json(_mapping(spec, "specialist")),
            encoder=encoder,
            decoder=decoder,
            provenance=_mapping(spec, "provenance"),
            report=_mapping(spec, "report"),
        )

    def delete(self, name: str) -> bool:
        """Whether there was such a specialist. Encoders stay: others, and cached codes, may name them."""
        folder = self._specialist_folder(name)
        return folder.is_dir() and delete_artefact(folder)

    def _encoder_folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ArtefactFormatError(f"{digest!r} is no digest of an encoder")
        return self.root / "encoders" / digest

    def _specialist_folder(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ArtefactFormatError(f"{name!r} is no name of a specialist: {NAME.pattern}")
        return self.root / "specialists" / name


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and pattern.fullmatch(path.name))


@contextmanager
def _malformed(what: str) -> Iterator[None]:
    """Shapes and indices that contradict each other surface in torch: here they are a malformed artefact."""
    try:
        yield
    except (RuntimeError, IndexError, AttributeError) as error:
        raise ArtefactFormatError(f"{what}: {error}") from error


def _mapping(spec: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = spec.get(key)
    if not isinstance(value, dict):
        raise ArtefactFormatError(f"manifest: {key} is {type(value).__name__}, not an object")
    return value


def _text(spec: Mapping[str, Any], key: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str):
        raise ArtefactFormatError(f"manifest: {key} is {type(value).__name__}, not a string")
    return value


def _part(artefact: Artefact, name: str) -> dict[str, Any]:
    if name not in artefact.tensors:
        raise ArtefactFormatError(f"{artefact.kind}: no {name} tensors")
    return artefact.tensors[name]
