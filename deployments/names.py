"""Names of the Serve applications, and how a specialist stands. Light: every process imports it."""

from __future__ import annotations

from dataclasses import dataclass

REGISTRAR = "registrar"
SPECIALIST = "specialist-"
PRODUCER = "producer-"


def producer_application(fingerprint: str) -> str:
    """The application of the producer with these weights."""
    return f"{PRODUCER}{fingerprint[:16]}"


def specialist_application(name: str) -> str:
    """The application of a specialist."""
    return f"{SPECIALIST}{name}"


@dataclass(frozen=True)
class Standing:
    """How a specialist of the registry stands.

    Attributes:
        status: Serve's word for its application; "REFUSED" when its artefact cannot be read, "UNKNOWN" when it
            has no application.
        message: why it does not serve.
    """

    name: str
    status: str
    message: str = ""

    @property
    def serves(self) -> bool:
        return self.status in {"RUNNING", "UNHEALTHY"}

    @property
    def why(self) -> str:
        """The message, or at least the status."""
        return self.message or self.status
