"""Why a specialist prefilled natively although it wanted codes: one word per kind of fault, for counters."""

from __future__ import annotations

from scd_core import errors

REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.CodeFormatError, "format"),
    (errors.CodeVersionError, "version"),
    (errors.CodeDigestError, "digest"),
    (errors.CodeEncoderError, "encoder"),
    (errors.CodePrefixError, "prefix"),
    (errors.NonFiniteError, "non_finite"),
    (errors.FingerprintError, "fingerprint"),
    (errors.TicketExpiredError, "expired"),
    (errors.ProducerUnavailableError, "producer_unavailable"),
    (errors.TransportError, "transport"),
    (errors.ArtefactError, "artefact"),
    (errors.PromptError, "prompt"),
    (errors.ContextLengthError, "producer_context"),
    (TimeoutError, "timeout"),
)
CACHE_FULL = "cache_full"
"""Decoded pages found no room in the engine's cache."""

UNEXPECTED = "unexpected"
"""An error that nobody foresaw: it stands in the log with its traceback."""


def reason_of(error: BaseException) -> str:
    """The counter's name for an error."""
    return next((reason for kind, reason in REASONS if isinstance(error, kind)), UNEXPECTED)
