"""Every error this project raises on purpose.

::

    SCDError
    ├── ModelError
    │   ├── UnsupportedModelError   the family, or a feature of it, is not supported
    │   ├── SignatureMismatchError  producer and specialist do not fit together
    │   ├── ModelUnavailableError   a model's files cannot be obtained
    │   └── ModelDigestError        a model's files are not the ones that are pinned
    ├── CodeError                   a code cannot be decoded: prefill natively instead
    │   ├── CodeFormatError         not a code at all, truncated, or its fields contradict each other
    │   ├── CodeVersionError        another version of the wire format
    │   ├── CodeDigestError         a byte changed on the way
    │   ├── CodeEncoderError        made by another encoder than the decoder was fitted to
    │   ├── CodePrefixError         made for other tokens than those asked for
    │   └── NonFiniteError          the state, or what was decoded from it, holds NaN or infinity
    ├── ArtefactError
    │   ├── ArtefactFormatError     manifest or tensors missing, malformed, or of another version
    │   ├── ArtefactDigestError     the files are not those that were written
    │   └── FingerprintError        the model at hand is not the one that was calibrated
    ├── CorpusError                 the calibration corpus cannot be read or is too small
    ├── EngineError                 the generation engine refused or lost a request
    │   ├── PromptError             the prompt is empty, or holds what is no token of the model
    │   ├── ContextLengthError      prompt and answer do not fit the model's context
    │   └── EngineStoppedError      the engine is not running
    ├── TransportError              a ticket could not be redeemed
    │   ├── TicketExpiredError      the producer no longer holds what the ticket names
    │   └── ProducerUnavailableError  the producer cannot be reached, or gave no answer in time
    └── PoolError                   the pool cannot take a request
        ├── UnknownSpecialistError  no specialist has that name
        ├── SpecialistUnavailableError  it is registered, but does not serve; the message says why
        └── OverloadedError         too many requests wait already
"""

from __future__ import annotations


class SCDError(Exception):
    """Root of the tree."""


class ModelError(SCDError):
    """A model cannot be used."""


class UnsupportedModelError(ModelError):
    """The family, or a feature of it, is not supported."""


class SignatureMismatchError(ModelError):
    """Producer and specialist do not fit together; the message names every mismatch with both values."""


class ModelUnavailableError(ModelError):
    """A model's files cannot be obtained; the message says what to do."""


class ModelDigestError(ModelError):
    """A model's files are not the ones that are pinned."""


class CodeError(SCDError):
    """A code cannot be decoded: prefill natively instead."""


class CodeFormatError(CodeError):
    """Not a code, truncated, or its fields contradict each other."""


class CodeVersionError(CodeError):
    """Another version of the wire format."""


class CodeDigestError(CodeError):
    """A byte changed on the way."""


class CodeEncoderError(CodeError):
    """Made by another encoder than the decoder was fitted to."""


class CodePrefixError(CodeError):
    """Made for other tokens than those asked for."""


class NonFiniteError(CodeError):
    """The state, or what was decoded from it, holds NaN or infinity."""


class ArtefactError(SCDError):
    """An artefact cannot be used."""


class ArtefactFormatError(ArtefactError):
    """Manifest or tensors missing, malformed, or of another version."""


class ArtefactDigestError(ArtefactError):
    """The files are not those that were written."""


class FingerprintError(ArtefactError):
    """The model at hand is not the one that was calibrated."""


class CorpusError(SCDError):
    """The calibration corpus cannot be read, or is too small."""


class EngineError(SCDError):
    """The generation engine refused or lost a request."""


class PromptError(EngineError):
    """The prompt is empty, or holds what is no token of the model."""


class ContextLengthError(EngineError):
    """Prompt and answer do not fit the model's context."""


class EngineStoppedError(EngineError):
    """The engine is not running."""


class TransportError(SCDError):
    """A ticket could not be redeemed."""


class TicketExpiredError(TransportError):
    """The producer no longer holds what the ticket names."""


class ProducerUnavailableError(TransportError):
    """The producer cannot be reached, or gave no answer in time."""


class PoolError(SCDError):
    """The pool cannot take a request."""


class UnknownSpecialistError(PoolError):
    """No specialist has that name."""


class SpecialistUnavailableError(PoolError):
    """The specialist is registered, but does not serve; the message says why."""


class OverloadedError(PoolError):
    """Too many requests wait already."""
