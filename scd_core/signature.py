"""What must be known of two models before one may read codes of the other.

Convention: a signature holds plain JSON values only, so that an artefact can carry it and a later load can compare
it without the model at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from scd_core.errors import ArtefactFormatError, SignatureMismatchError

MAY_DIFFER = frozenset({"rope", "fingerprint", "max_positions"})
"""What a specialist's training may change: keys travel de-rotated, so each side applies its own RoPE."""


@dataclass(frozen=True)
class ModelSignature:
    """A model's shape, conventions and identity.

    Attributes:
        family: transformers' ``model_type``.
        layers, heads, kv_heads, head_dim, hidden_size, vocab_size: geometry; ``vocab_size`` counts embedding rows.
        rope: per layer type, ``{"type", "theta", ...}`` with every scaling parameter.
        window: tokens a sliding-window layer attends to, itself included; None when no layer slides.
        layer_types: per layer, "full_attention" or "sliding_attention".
        qk_norm: keys are normalised per head before RoPE.
        attn_softcap: cap of the attention logits, or None.
        tokenizer_hash: digest of the vocabulary and merges; not of chat template, BOS habits or the choice of EOS.
        fingerprint: digest of the weights.
        max_positions: the longest sequence the model is meant for.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    rope: Mapping[str, Mapping[str, Any]] = field(hash=False)
    window: int | None
    layer_types: tuple[str, ...]
    qk_norm: bool
    attn_softcap: float | None
    tokenizer_hash: str
    fingerprint: str
    max_positions: int

    @property
    def kv_dim(self) -> int:
        """Width of one layer's keys, heads-major."""
        return self.kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """As JSON values; ``from_json`` is the inverse."""
        return {**asdict(self), "layer_types": list(self.layer_types)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSignature:
        """The inverse of ``to_json``.

        Raises:
            ArtefactFormatError: a field is missing, unknown or of a wrong type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            found = sorted(set(data) ^ names) if isinstance(data, Mapping) else type(data).__name__
            raise ArtefactFormatError(f"signature: missing or unknown fields {found}")
        for f in fields(cls):
            if f.type == "int" and (not isinstance(data[f.name], int) or data[f.name] <= 0):
                raise ArtefactFormatError(f"signature: {f.name} = {data[f.name]!r} is not a positive integer")
            if f.type == "str" and not isinstance(data[f.name], str):
                raise ArtefactFormatError(f"signature: {f.name} = {data[f.name]!r} is not a string")
        if not isinstance(data["rope"], Mapping) or not isinstance(data["layer_types"], list | tuple):
            raise ArtefactFormatError("signature: rope must be a mapping and layer_types a list")
        return cls(**{**data, "layer_types": tuple(data["layer_types"])})


def check_pair(producer: ModelSignature, specialist: ModelSignature) -> None:
    """Refuse two models whose states do not correspond.

    RoPE, weights (with those of the norms) and the longest sequence may differ; everything else must be equal.

    Raises:
        SignatureMismatchError: names every mismatch with both values.
    """
    mismatches = [
        f"{f.name}: producer {_shown(theirs)}, specialist {_shown(ours)}"
        for f in fields(ModelSignature)
        if f.name not in MAY_DIFFER
        and (theirs := getattr(producer, f.name)) != (ours := getattr(specialist, f.name))
    ]
    if mismatches:
        raise SignatureMismatchError("producer and specialist do not fit together: " + "; ".join(mismatches))


def _shown(value: Any) -> str:
    return json.dumps(value)


def serving_refusal(signature: ModelSignature) -> str | None:
    """Why a model cannot be served from seeded cache pages, or None when it can.

    The paged cache shares no prefixes between requests when a layer slides, so seeded pages would never be found;
    and paged attention knows no softcap. A window that is never reached can be taken off: ``load_model(limit=)``.
    """
    if signature.attn_softcap is not None:
        return (
            f"{signature.family}: attention logits are capped at {signature.attn_softcap}, which paged "
            "attention does not do"
        )
    if "sliding_attention" in signature.layer_types:
        return (
            f"{signature.family}: layers slide over {signature.window} tokens and prompts may have "
            f"{signature.max_positions}; the paged cache shares no prefixes then. Load the model with a "
            f"limit of at most {signature.window} tokens, if its family allows it"
        )
    return None
